//! `--device`: the machine's GPU, or its CPU within a budget of bytes.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use plimsoll_core::{Component, Meters};
use plimsoll_device::cuda::{self, Gpu, GpuError, GpuLimit, GpuOptions, Holder};
use plimsoll_device::{Budget, Machine, capacity};

use crate::args::{DType, DeviceArgs, EngineArgs, KvDtype};
use crate::bytes::Bytes;
use crate::error::Error;
use crate::lock::{DeviceLock, Locks};
use crate::source::Source;

/// Bytes the simulated device has unless `--device-memory` says more or less.
const SIM_BYTES: u64 = 4 << 30;

/// `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first GPU; the CPU where there is none, no driver, or no GPU code in this binary.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this number among those that the driver shows.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "auto" => Some(Self::Auto),
            None if text == "cpu" => Some(Self::Cpu),
            None if text == "cuda" => Some(Self::Cuda(0)),
            Some(("cuda", number)) => number.parse().map(Self::Cuda).ok(),
            _ => None,
        }
        .ok_or_else(|| "auto, cpu, cuda or cuda:N is expected".to_owned())
    }
}

impl DeviceChoice {
    /// Number of the GPU to look for, if one is.
    fn ordinal(self) -> Option<usize> {
        match self {
            Self::Auto => Some(0),
            Self::Cpu => None,
            Self::Cuda(number) => Some(number),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// Where the model runs, with the account of its memory. Clones share it.
#[derive(Clone, Debug)]
pub enum Device {
    /// The CPU, within a budget.
    Cpu(Budget),
    /// A GPU.
    Gpu(Gpu),
}

impl From<Budget> for Device {
    fn from(budget: Budget) -> Self {
        Self::Cpu(budget)
    }
}

impl From<Gpu> for Device {
    fn from(gpu: Gpu) -> Self {
        Self::Gpu(gpu)
    }
}

/// Where a model is planned to run.
#[derive(Clone, Debug)]
pub enum Site {
    /// On a device of this machine.
    There(Device),
    /// On a GPU with so many bytes, which this machine does not have.
    AssumedGpu(u64),
}

impl Site {
    /// The device that `args` ask for, as [`Device::open`], but nobody is waited for: it is only looked at. A GPU that is not
    /// there is assumed, if `--device cuda` asks for one and `--device-memory` says how large it is.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn look(source: &Source, args: &EngineArgs) -> Result<Self, Error> {
        let choice = choice(source, args)?;
        match (
            choose(choice, |ordinal| open_gpu(ordinal, args), holders),
            args.memory.device_memory,
        ) {
            (Ok(Chosen { gpu: Some(gpu), .. }), _) => {
                check_gpu(args)?;
                Ok(Self::There(Device::Gpu(gpu)))
            }
            (Ok(Chosen { gpu: None, .. }), _) => {
                check_cpu(args)?;
                Ok(Self::There(Device::Cpu(budget(source, args)?)))
            }
            (Err(Error::Gpu(error)), Some(Bytes(bytes))) if is_absent(&error) => {
                check_gpu(args)?;
                Ok(Self::AssumedGpu(bytes))
            }
            (Err(Error::Gpu(error)), None) if is_absent(&error) => Err(wrong(
                "--device",
                &format!(
                    "{error}; to plan for a GPU that is not here, say how large it is: --device-memory 80GiB"
                ),
            )),
            (Err(error), _) => Err(error),
        }
    }
}

/// `--device`, for a model that may have no choice.
fn choice(source: &Source, args: &EngineArgs) -> Result<DeviceChoice, Error> {
    match (source, args.device.device) {
        (Source::Sim, DeviceChoice::Cuda(_)) => Err(wrong("--device", "the simulated model runs on the CPU")),
        (Source::Sim, _) => Ok(DeviceChoice::Cpu),
        (Source::Files { .. }, choice) => Ok(choice),
    }
}

fn open_gpu(ordinal: usize, args: &EngineArgs) -> Result<Gpu, GpuError> {
    let options = GpuOptions {
        limit: limit(args),
        cap: None,
    };
    if !plimsoll_kernels::cuda::has_images() {
        cuda::uuid(ordinal)?;
        return Err(GpuError::NoKernels);
    }
    let gpu = Gpu::open_with(ordinal, options)?;
    plimsoll_kernels::cuda::check(&gpu)?;
    Ok(gpu)
}

impl Device {
    /// The device that `args` ask for, open; says in the log which it is and why. Nobody else may measure it until the
    /// lock is dropped, which is to be kept until this process has taken all that it will ever take.
    ///
    /// # Errors
    /// Where a GPU was asked for and cannot be used, flags do not suit the device, or another start works on it.
    pub fn open(source: &Source, args: &EngineArgs) -> Result<(Self, DeviceLock), Error> {
        let choice = choice(source, args)?;
        let locks = Locks::new(args);
        let gpu_lock = choice.ordinal().map(cuda::uuid).transpose();
        // What keeps a GPU from having a name keeps it from being opened too, which says so.
        let gpu_lock = match gpu_lock {
            Ok(Some(uuid)) => locks.take(&uuid)?,
            Ok(None) | Err(_) => DeviceLock::none(),
        };
        let Chosen { gpu, why } = choose(choice, |ordinal| open_gpu(ordinal, args), holders)?;
        let opened = match gpu {
            Some(gpu) => {
                check_gpu(args)?;
                let info = gpu.info();
                let (major, minor) = info.compute_capability;
                tracing::info!(
                    "device: cuda:{}, {}, compute capability {major}.{minor}, {}",
                    info.ordinal,
                    info.name,
                    Bytes(gpu.budget().meters().total)
                );
                (Self::Gpu(gpu), gpu_lock)
            }
            None => {
                drop(gpu_lock);
                check_cpu(args)?;
                match why {
                    None => tracing::info!("device: cpu"),
                    Some(GpuError::NoDriver) => tracing::info!("device: cpu (no NVIDIA driver)"),
                    Some(GpuError::NoDevice { .. }) => tracing::info!("device: cpu (no NVIDIA GPU)"),
                    Some(why) => tracing::info!("device: cpu ({why})"),
                }
                let lock = match source {
                    Source::Sim => DeviceLock::none(),
                    Source::Files { .. } => locks.take("cpu")?,
                };
                (Self::Cpu(budget(source, args)?), lock)
            }
        };
        Ok(opened)
    }

    /// The device's meters, now. Asks the device or the operating system: not for the step path.
    pub fn meters(&self) -> Meters {
        match self {
            Self::Cpu(budget) => {
                budget.look();
                budget.meters()
            }
            Self::Gpu(gpu) => gpu.meters(),
        }
    }

    /// Allocations made there so far.
    pub(crate) fn allocations(&self) -> u64 {
        match self {
            Self::Cpu(budget) => budget.meters().allocations,
            Self::Gpu(gpu) => gpu.allocations(),
        }
    }

    /// Sets the high-water marks to what is in use now.
    pub(crate) fn reset_high_water(&self) {
        match self {
            Self::Cpu(budget) => budget.reset_high_water(),
            Self::Gpu(gpu) => {
                if let Err(error) = gpu.reset_high_water() {
                    tracing::error!(%error, "the GPU's high-water marks could not be reset");
                }
            }
        }
    }

    /// What this process has allocated there.
    pub(crate) fn account(&self) -> &Budget {
        match self {
            Self::Cpu(budget) => budget,
            Self::Gpu(gpu) => gpu.budget(),
        }
    }

    /// Logs which processes hold memory of the GPU, where others do.
    pub(crate) fn log_neighbours(&self) {
        if let Self::Gpu(gpu) = self
            && gpu.meters().peers() > 0
        {
            let ordinal = gpu.info().ordinal;
            for holder in holders(ordinal) {
                tracing::warn!("of the memory of cuda:{ordinal}, {holder}");
            }
        }
    }

    /// Bytes of the weights that were loaded.
    pub(crate) fn weights_bytes(&self) -> u64 {
        self.account().meters().by_component.get(Component::Weights)
    }
}

/// What a choice came to.
#[derive(Debug)]
struct Chosen<G> {
    /// The GPU; without one it is the CPU.
    gpu: Option<G>,
    /// Why there is no GPU, where one was looked for.
    why: Option<GpuError>,
}

/// Follows `choice`; `open` gives the GPU of a number ready for use.
fn choose<G>(
    choice: DeviceChoice,
    open: impl FnOnce(usize) -> Result<G, GpuError>,
    holders: impl FnOnce(usize) -> Vec<Holder>,
) -> Result<Chosen<G>, Error> {
    let Some(ordinal) = choice.ordinal() else {
        return Ok(Chosen { gpu: None, why: None });
    };
    match open(ordinal) {
        Ok(gpu) => Ok(Chosen {
            gpu: Some(gpu),
            why: None,
        }),
        Err(why) if choice == DeviceChoice::Auto && is_absent(&why) => Ok(Chosen {
            gpu: None,
            why: Some(why),
        }),
        // A model that is made for a GPU would take minutes for an answer on a CPU: nobody wants that unasked.
        Err(error) if error.is_out_of_memory() => Err(Error::GpuFull {
            ordinal,
            holders: holders(ordinal),
            error,
        }),
        Err(error) => Err(error.into()),
    }
}

/// Whether there is no GPU, or none that this binary was made for.
fn is_absent(error: &GpuError) -> bool {
    matches!(
        error,
        GpuError::NoDriver | GpuError::NoDevice { .. } | GpuError::NoKernels
    )
}

/// Other processes that hold memory of a GPU.
fn holders(ordinal: usize) -> Vec<Holder> {
    let mut holders = cuda::uuid(ordinal).map_or_else(|_| Vec::new(), |uuid| cuda::holders(&uuid));
    holders.retain(|holder| holder.pid != std::process::id());
    holders
}

fn limit(args: &EngineArgs) -> GpuLimit {
    match (args.memory.device_memory, args.memory.gpu_memory_utilization) {
        (Some(Bytes(bytes)), _) => GpuLimit::Bytes(bytes),
        (None, Some(fraction)) => GpuLimit::Fraction(fraction.get()),
        (None, None) => GpuLimit::All,
    }
}

/// What `--device-memory` grants, or what this machine can spare. The simulated device is nobody else's.
fn budget(source: &Source, args: &EngineArgs) -> Result<Budget, Error> {
    let given = args.memory.device_memory.map(|Bytes(bytes)| bytes);
    if let Source::Sim = source {
        return Ok(Budget::new(given.unwrap_or(SIM_BYTES)));
    }
    let bytes = match given {
        Some(bytes) => bytes,
        None => {
            let capacity = capacity::default_capacity()?;
            tracing::info!("device memory: {}, {}", Bytes(capacity.bytes), capacity.bound);
            capacity.bytes
        }
    };
    Ok(Budget::shared(bytes, Arc::new(Machine::this())))
}

/// Refuses what only a CPU can do.
fn check_gpu(args: &EngineArgs) -> Result<(), Error> {
    let DeviceArgs { dtype, .. } = args.device;
    if !matches!(dtype, DType::Auto | DType::Bfloat16) {
        return Err(wrong(
            "--dtype",
            "a GPU computes in bfloat16, with sums in float32; give auto or bfloat16, or --device cpu",
        ));
    }
    if !matches!(args.limits.kv_cache_dtype, KvDtype::Auto | KvDtype::Bfloat16) {
        return Err(wrong(
            "--kv-cache-dtype",
            "the KV cache of a GPU is bfloat16; give auto or bfloat16, or --device cpu",
        ));
    }
    if args.limits.threads.is_some() {
        return Err(wrong(
            "--threads",
            "a GPU computes; --device cpu has threads to count",
        ));
    }
    Ok(())
}

/// Refuses what only a GPU can do.
fn check_cpu(args: &EngineArgs) -> Result<(), Error> {
    if args.device.dtype != DType::Auto {
        return Err(wrong(
            "--dtype",
            "a CPU keeps weights as the model stores them and computes in float32; leave it at auto",
        ));
    }
    if args.limits.kv_cache_dtype == KvDtype::Bfloat16 {
        return Err(wrong(
            "--kv-cache-dtype",
            "the KV cache of a CPU is float16 or float32; bfloat16 needs a GPU",
        ));
    }
    if args.memory.gpu_memory_utilization.is_some() {
        return Err(wrong(
            "--gpu-memory-utilization",
            "there is no GPU in use; --device-memory limits the memory of a CPU",
        ));
    }
    Ok(())
}

fn wrong(flag: &str, message: &str) -> Error {
    Error::Configuration {
        origin: flag.to_owned(),
        message: message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn args(flags: &str) -> EngineArgs {
        let argv = ["plimsoll", "profile"]
            .into_iter()
            .chain(flags.split_whitespace());
        match Cli::try_parse_from(argv).unwrap().command {
            Command::Profile(args) => args.engine,
            other => panic!("not profile: {other:?}"),
        }
    }

    fn nobody(_: usize) -> Vec<Holder> {
        Vec::new()
    }

    fn old() -> GpuError {
        GpuError::OldDevice {
            name: "Old".into(),
            major: 7,
            minor: 5,
        }
    }

    #[test]
    fn auto_takes_the_first_gpu_that_can_be_used() {
        let chosen = choose(DeviceChoice::Auto, Ok, nobody).unwrap();
        assert_eq!((chosen.gpu, chosen.why), (Some(0), None));
        let reasons = [
            GpuError::NoDriver,
            GpuError::NoDevice { ordinal: 0, count: 0 },
            GpuError::NoKernels,
        ];
        for why in reasons {
            let chosen = choose::<()>(DeviceChoice::Auto, |_| Err(why.clone()), nobody).unwrap();
            assert_eq!((chosen.gpu, chosen.why), (None, Some(why)));
        }
        // One that is there and cannot be used is no reason to be a hundred times slower.
        let broken = GpuError::Call {
            call: "cuInit",
            code: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH".into(),
            message: String::new(),
        };
        for why in [old(), broken] {
            let error = choose::<()>(DeviceChoice::Auto, |_| Err(why.clone()), nobody).unwrap_err();
            assert_eq!((error.exit_code(), error.to_string()), (7, why.to_string()));
        }
    }

    /// As measured where another server held all of an H200.
    #[test]
    fn a_gpu_that_is_full_is_an_error_that_says_who_holds_it() {
        let full = GpuError::Call {
            call: "cuDevicePrimaryCtxRetain",
            code: "CUDA_ERROR_OUT_OF_MEMORY".into(),
            message: "out of memory".into(),
        };
        let holder = Holder {
            pid: 4711,
            name: Some("plimsoll".into()),
            bytes: Some(139 << 30),
        };
        for choice in [DeviceChoice::Auto, DeviceChoice::Cuda(0)] {
            let open = |_| Err::<(), _>(full.clone());
            let error = choose(choice, open, |_| vec![holder.clone()]).unwrap_err();
            assert_eq!(error.exit_code(), 4);
            let text = error.to_string();
            let parts = [
                "cuda:0",
                "process 4711 (plimsoll) holds 139.00 GiB",
                "--mem-fraction",
                "--device cpu",
            ];
            for part in parts {
                assert!(text.contains(part), "{part} is missing: {text}");
            }
            let error = choose(choice, open, nobody).unwrap_err();
            assert!(error.to_string().contains("nvidia-smi"), "{error}");
        }
    }

    #[test]
    fn a_gpu_that_was_asked_for_is_that_gpu_or_an_error() {
        assert_eq!(choose(DeviceChoice::Cuda(3), Ok, nobody).unwrap().gpu, Some(3));
        let error = choose::<()>(DeviceChoice::Cuda(0), |_| Err(old()), nobody).unwrap_err();
        assert!(error.to_string().contains("7.5"), "{error}");
        assert_eq!(error.exit_code(), 7);
        let never = |_| -> Result<(), _> { panic!("the CPU needs no GPU") };
        assert!(choose(DeviceChoice::Cpu, never, nobody).unwrap().gpu.is_none());
    }

    #[test]
    fn devices_have_names() {
        for (text, choice) in [
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("cuda:0", DeviceChoice::Cuda(0)),
            ("cuda:11", DeviceChoice::Cuda(11)),
        ] {
            assert_eq!(text.parse(), Ok(choice));
            assert_eq!(choice.to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "auto:1"] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn flags_that_do_not_suit_the_device_are_refused_by_name() {
        let on_gpu = [
            ("--dtype float16", "--dtype"),
            ("--dtype float32", "--dtype"),
            ("--kv-cache-dtype float16", "--kv-cache-dtype"),
            ("--threads 2", "--threads"),
        ];
        let on_cpu = [
            ("--dtype bfloat16", "--dtype"),
            ("--kv-cache-dtype bfloat16", "--kv-cache-dtype"),
            ("--gpu-memory-utilization 0.5", "--gpu-memory-utilization"),
        ];
        let refused = |result: Result<(), Error>, flag: &str| {
            let error = result.unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().starts_with(flag), "{error}");
        };
        for (flags, flag) in on_gpu {
            refused(check_gpu(&args(flags)), flag);
        }
        for (flags, flag) in on_cpu {
            refused(check_cpu(&args(flags)), flag);
        }
        check_gpu(&args(
            "--dtype bfloat16 --kv-cache-dtype bfloat16 --enforce-eager",
        ))
        .unwrap();
        check_cpu(&args("--kv-cache-dtype float32 --threads 2 --enforce-eager")).unwrap();
        for flags in ["", "--dtype auto --kv-cache-dtype auto"] {
            check_gpu(&args(flags)).unwrap();
            check_cpu(&args(flags)).unwrap();
        }
    }

    #[test]
    fn a_limit_is_in_bytes_or_a_part() {
        assert_eq!(limit(&args("")), GpuLimit::All);
        assert_eq!(limit(&args("--device-memory 8GiB")), GpuLimit::Bytes(8 << 30));
        assert_eq!(
            limit(&args("--gpu-memory-utilization 0.9")),
            GpuLimit::Fraction(0.9)
        );
    }

    #[test]
    fn the_simulated_model_needs_no_gpu() {
        let (device, lock) = Device::open(&Source::Sim, &args("sim")).unwrap();
        assert!(matches!(&device, Device::Cpu(_)));
        assert!(!lock.is_held(), "the simulated device is this process's own");
        assert_eq!(device.meters().total, SIM_BYTES);
        let error = Device::open(&Source::Sim, &args("sim --device cuda")).unwrap_err();
        assert_eq!(error.exit_code(), 2);
    }
}
