/// A step to be timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TimedShape {
    /// Its tokens.
    pub(crate) rows: usize,
    /// Requests that generate one of them; the others are of prompts.
    pub(crate) decoding: usize,
    /// Tokens before each one that is generated.
    pub(crate) context: usize,
}

impl TimedShape {
    /// A step in which every request generates.
    pub(crate) fn decode(rows: usize, context: usize) -> Self {
        Self {
            rows,
            decoding: rows,
            context,
        }
    }

    /// Whether it computes prompts.
    pub(crate) fn is_mixed(&self) -> bool {
        self.decoding < self.rows
    }
}
