use std::time::Instant;

/// Logs how long the parts of a load or a build take that follow each other, at the level debug.
#[derive(Debug)]
pub(super) struct Laps(Instant);

impl Laps {
    /// The first part begins.
    pub(super) fn begin() -> Self {
        Self(Instant::now())
    }

    /// A part has ended, and the next begins.
    pub(super) fn end(&mut self, part: &str) {
        let seconds = self.0.elapsed().as_secs_f64();
        tracing::debug!("{part}: {seconds:.3} s");
        self.0 = Instant::now();
    }
}
