use plimsoll_core::Meters;
use plimsoll_profiler::{ProfileError, Proved};

/// What the engine needs of the device besides steps: memory meters, and a new state after one was lost or freed.
pub trait StateSource<S>: Send {
    /// Most device bytes that this process held since the current state was proved. Read after every step, so it must come
    /// from the process's own account, without a driver call.
    fn high_water(&self) -> u64;

    /// The same during the worst steps, without the canary: serving must not exceed it.
    fn proved_peak(&self) -> u64;

    /// The device's meters, other processes included. Read only after failures.
    fn meters(&self) -> Meters;

    /// Waits for the device, then frees memory that allocators hold without using it.
    fn trim(&mut self);

    /// Builds and proves a state of the size of the start, or of what fits now. The former state was dropped before. This may
    /// take long: implementations call `meanwhile` at every step, and while memory is allocated and graphs are captured.
    ///
    /// # Errors
    /// [`RebuildError`]; all memory of the attempt is freed by then.
    fn rebuild(&mut self, meanwhile: &mut dyn FnMut()) -> Result<Proved<S>, RebuildError>;
}

/// Why there is no new state.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RebuildError {
    /// There is too little memory, or another process holds the device's lock: a later try may succeed.
    #[error("{0}")]
    NotNow(String),
    /// A defect: the next try would fail too.
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
