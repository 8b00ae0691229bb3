use plimsoll_core::Meters;
use plimsoll_profiler::{ProfileError, Proved};

/// What the engine asks of the device besides steps: how its memory stands, and a new state in place of one that is lost or
/// was given back.
pub trait StateSource<S>: Send {
    /// Highest bytes of the device that this process held since the state in use was proved. Read after every step, so from
    /// an account of the process's own, without a call of the driver.
    fn high_water(&self) -> u64;

    /// The same while the worst steps ran, without the canary: serving shall stay at or below it.
    fn proved_peak(&self) -> u64;

    /// The device's meters, neighbours included. Not read while all is well.
    fn meters(&self) -> Meters;

    /// Waits for the device and returns what allocators hold without using it.
    fn trim(&mut self);

    /// Builds a state of the size of the start, or of what fits by now, and proves it. The former state is dropped by then.
    /// That may take long: `meanwhile` is to be called at every step, and while memory and graphs are made.
    ///
    /// # Errors
    /// [`RebuildError`]; nothing is held by then.
    fn rebuild(&mut self, meanwhile: &mut dyn FnMut()) -> Result<Proved<S>, RebuildError>;
}

/// Why there is no new state.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RebuildError {
    /// There is too little memory, or another process measures it: that may change.
    #[error("{0}")]
    NotNow(String),
    /// The next try would end the same way.
    #[error(transparent)]
    Defect(ProfileError),
}

impl From<ProfileError> for RebuildError {
    fn from(error: ProfileError) -> Self {
        match error {
            ProfileError::DoesNotFit(diagnostic) => Self::NotNow(diagnostic.facts()),
            defect => Self::Defect(defect),
        }
    }
}
