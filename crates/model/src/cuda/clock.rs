use plimsoll_core::DeviceTime;
use plimsoll_device::cuda::{Event, Gpu, GpuError};

/// Steps whose events are kept: the gap before a step is known once it has ended, when the one after it and the one before
/// it still need theirs.
const KEPT: usize = super::runner::STEPS_IN_FLIGHT + 1;

/// When steps began and ended on the device, and how long it stood idle between them.
#[derive(Debug)]
pub(super) struct Clocks {
    events: [(Event, Event); KEPT],
    /// Whether the time before a step counts as idle: there was work, and the host was late.
    counted: [bool; KEPT],
    resting: bool,
    time: DeviceTime,
}

impl Clocks {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let pair = || Ok((gpu.event()?, gpu.event()?));
        Ok(Self {
            events: [pair()?, pair()?, pair()?],
            counted: [false; KEPT],
            resting: true,
            time: DeviceTime::default(),
        })
    }

    /// Before the first thing that step number `step` launches.
    pub(super) fn begin(&mut self, step: usize) -> Result<(), GpuError> {
        self.counted[step % KEPT] = !std::mem::take(&mut self.resting);
        self.events[step % KEPT].0.record()
    }

    /// After the last thing that step number `step` launches.
    pub(super) fn end(&mut self, step: usize) -> Result<(), GpuError> {
        self.events[step % KEPT].1.record()
    }

    /// There is no work: what passes until the next step is nobody's fault.
    pub(super) fn rest(&mut self) {
        self.resting = true;
    }

    /// Waits for the end of step number `step`.
    pub(super) fn wait(&mut self, step: usize) -> Result<(), GpuError> {
        let (begin, end) = &self.events[step % KEPT];
        end.synchronize()?;
        self.time.busy_seconds += f64::from(begin.elapsed_ms(end)?) / 1e3;
        if step > 0 && self.counted[step % KEPT] {
            let (_, before) = &self.events[(step - 1) % KEPT];
            self.time.idle_seconds += f64::from(before.elapsed_ms(begin)?.max(0.0)) / 1e3;
        }
        Ok(())
    }

    /// So far.
    pub(super) fn time(&self) -> DeviceTime {
        self.time
    }
}
