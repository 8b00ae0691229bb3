use plimsoll_core::{BuildError, Executor, Meters, StateConfig};

/// How far the build of a state is: sent again and again, so that a long build is told from one that hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuildProgress {
    /// More of the memory is there.
    Memory,
    /// The next CUDA graph is captured.
    Graph {
        /// Graphs that are captured.
        done: usize,
        /// Graphs of the state.
        of: usize,
    },
}

/// The device, as the profile sees it: it builds engine states, and it has meters.
///
/// A state is one value that owns everything a [`StateConfig`] decides (KV, step arena, staging, graphs, canary) and frees
/// all of it when dropped, so that nothing can be forgotten between two attempts. Weights stay outside.
pub trait Target {
    /// What serves once it is proved.
    type State: Executor;

    /// Builds a state and reports to `progress`. On failure everything taken so far must have been given back.
    ///
    /// # Errors
    /// [`BuildError::Oom`] if the device cannot hold it, [`BuildError::Device`] if it fails otherwise.
    fn build(
        &mut self,
        config: &StateConfig,
        progress: &mut dyn FnMut(BuildProgress),
    ) -> Result<Self::State, BuildError>;

    /// Reads the meters.
    fn meters(&self) -> Meters;

    /// Sets the high-water marks to what is in use now.
    fn reset_high_water(&mut self);

    /// Waits for the device and returns what allocators hold without using it.
    fn trim(&mut self);

    /// Most bytes of the step arena in use at once since the state was built or this was last called.
    fn take_scratch_high_water(&mut self, state: &mut Self::State) -> u64;

    /// Frees the state's canary.
    fn release_canary(&mut self, state: &mut Self::State);
}
