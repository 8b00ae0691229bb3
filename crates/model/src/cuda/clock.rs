use plimsoll_core::DeviceTime;
use plimsoll_device::cuda::{Event, Gpu, GpuError};

/// Steps whose events are kept: the gap before a step is known once it has ended, when the one after it and the one before
/// it still need theirs.
const KEPT: usize = super::staging::STEPS_IN_FLIGHT + 1;

/// When steps began and ended on the device, and how long it stood idle between and within them.
#[derive(Debug)]
pub(super) struct Clocks {
    steps: [StepClock; KEPT],
    resting: bool,
    time: DeviceTime,
}

#[derive(Debug)]
struct StepClock {
    begin: Event,
    end: Event,
    /// Around the time for which the step's second half waited for its masks.
    paused: Event,
    resumed: Event,
    has_halves: bool,
    /// Whether the time before the step counts as idle: there was work, and the host was late.
    counted: bool,
}

impl StepClock {
    fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        Ok(Self {
            begin: gpu.event()?,
            end: gpu.event()?,
            paused: gpu.event()?,
            resumed: gpu.event()?,
            has_halves: false,
            counted: false,
        })
    }
}

impl Clocks {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let clock = || StepClock::new(gpu);
        Ok(Self {
            steps: [clock()?, clock()?, clock()?],
            resting: true,
            time: DeviceTime::default(),
        })
    }

    /// Before the first thing that step number `step` launches.
    pub(super) fn begin(&mut self, step: usize) -> Result<(), GpuError> {
        let clock = &mut self.steps[step % KEPT];
        clock.counted = !std::mem::take(&mut self.resting);
        clock.has_halves = false;
        clock.begin.record()
    }

    /// After the first half of a step that awaits masks. It ends here, should the other half never come.
    pub(super) fn pause(&mut self, step: usize) -> Result<(), GpuError> {
        self.steps[step % KEPT].paused.record()?;
        self.end(step)
    }

    /// Before the other half.
    pub(super) fn resume(&mut self, step: usize) -> Result<(), GpuError> {
        let clock = &mut self.steps[step % KEPT];
        clock.has_halves = true;
        clock.resumed.record()
    }

    /// After the last thing that step number `step` launches.
    pub(super) fn end(&mut self, step: usize) -> Result<(), GpuError> {
        self.steps[step % KEPT].end.record()
    }

    /// There is no work: what passes until the next step is nobody's fault.
    pub(super) fn rest(&mut self) {
        self.resting = true;
    }

    /// Waits for the end of step number `step`.
    pub(super) fn wait(&mut self, step: usize) -> Result<(), GpuError> {
        let clock = &self.steps[step % KEPT];
        clock.end.synchronize()?;
        let waited = match clock.has_halves {
            true => seconds(&clock.paused, &clock.resumed)?,
            false => 0.0,
        };
        self.time.busy_seconds += seconds(&clock.begin, &clock.end)? - waited;
        self.time.idle_seconds += waited;
        if step > 0 && clock.counted {
            let before = &self.steps[(step - 1) % KEPT];
            self.time.idle_seconds += seconds(&before.end, &clock.begin)?.max(0.0);
        }
        Ok(())
    }

    /// So far.
    pub(super) fn time(&self) -> DeviceTime {
        self.time
    }
}

fn seconds(from: &Event, to: &Event) -> Result<f64, GpuError> {
    Ok(f64::from(from.elapsed_ms(to)?) / 1e3)
}
