/// What the engine asks of the device besides steps.
///
/// Highest means: since the state in use was proved. Both readings come from an account that this process keeps of its own
/// memory, never from the driver, since one of them is read after every step.
pub trait StateSource<S>: Send {
    /// Highest bytes of the device that this process held at once.
    fn high_water(&self) -> u64;

    /// The same while the worst steps ran, without the canary: serving shall stay at or below it.
    fn proved_peak(&self) -> u64;
}
