//! `--device`: which backend a start gets.

use std::path::Path;
use std::sync::{Arc, Mutex};

use plimsoll_device::cuda::{self, Gpu, GpuError, GpuLimit, GpuOptions, Holder};
use plimsoll_device::{Budget, Machine, capacity};
use plimsoll_kernels::Exchange;
use plimsoll_kernels::cuda::open_libraries;

use super::gpu::holders;
use super::{
    AssumedBytes, AssumedGpu, Backend, CpuBackend, CpuRank, Device, GpuBackend, GpuPart, RanksBackend,
    SimBackend, ranks_on_gpus,
};
use crate::args::{DType, DeviceChoice, KvDtype};
use crate::bytes::Bytes;
use crate::error::Error;
use crate::images;
use crate::lock::DeviceLock;
use crate::settings::EngineSettings;
use crate::source::Source;
use crate::terminal;

/// Bytes the simulated device has unless `--device-memory` says more or less.
const SIM_BYTES: u64 = 4 << 30;

/// The device that the settings ask for, as [`open`], but it is only looked at: nobody is waited for. A GPU that is not
/// there is assumed, if `--device cuda` asks for one and `--device-memory` says how large it is.
///
/// # Errors
/// As [`open`].
pub fn look(source: &Source, settings: &Arc<EngineSettings>) -> Result<Box<dyn Device>, Error> {
    match source {
        Source::Sim => Ok(Box::new(simulated(settings)?)),
        Source::Files { model, .. } => Place::look(settings)?.with(model, settings),
    }
}

/// Where models would run: a device that is only looked at, once for all of them.
#[derive(Debug)]
pub enum Place {
    /// GPUs that are here, one for each rank.
    Gpus(Vec<Gpu>),
    /// GPUs that are not here.
    Assumed(AssumedBytes),
    /// The CPU, within the budget of each rank.
    Cpu(Vec<Budget>),
}

impl Place {
    /// As [`look`], for a model of files.
    ///
    /// # Errors
    /// As [`open`].
    pub fn look(settings: &EngineSettings) -> Result<Self, Error> {
        match (
            choose(
                &settings.device,
                &numbers(settings)?,
                |ordinal| open_gpu(ordinal, settings),
                holders,
            ),
            settings.device_memory,
        ) {
            (Ok(Chosen { gpus, .. }), _) if gpus.is_empty() => {
                check_cpu(settings)?;
                Ok(Self::Cpu(planned_budgets(settings)?))
            }
            (Ok(Chosen { gpus, .. }), _) => {
                check_gpu(settings)?;
                ranks_on_gpus::check_alike(&gpus)?;
                Ok(Self::Gpus(gpus))
            }
            (Err(Error::Gpu(error)), Some(bytes)) if is_absent(&error) => {
                check_gpu(settings)?;
                Ok(Self::Assumed(AssumedBytes(bytes)))
            }
            (Err(Error::Gpu(error)), None) if is_absent(&error) => Err(Error::configuration(
                "--device",
                format!(
                    "{error}; to plan for a GPU that this machine does not have, set its size: --device-memory 80GiB"
                ),
            )),
            (Err(error), _) => Err(error),
        }
    }

    /// For people.
    pub fn name(&self) -> String {
        match self {
            Self::Gpus(gpus) => {
                let name = |gpu: &Gpu| {
                    let bytes = Bytes(gpu.budget().meters().total);
                    format!("cuda:{} ({}), {bytes}", gpu.info().ordinal, gpu.info().name)
                };
                gpus.iter().map(name).collect::<Vec<_>>().join("; ")
            }
            Self::Assumed(AssumedBytes(bytes)) => format!("cuda (assumed), {}", Bytes(*bytes)),
            Self::Cpu(budgets) => format!("cpu, {}", Bytes(total(budgets))),
        }
    }

    /// The device with the model at `model`, a directory or a GGUF file.
    ///
    /// # Errors
    /// Where the files that say how images are taken cannot be read.
    pub fn with(&self, model: &Path, settings: &Arc<EngineSettings>) -> Result<Box<dyn Device>, Error> {
        let with_images = || images::settings_of(model, settings);
        Ok(match self {
            Self::Gpus(gpus) => match &gpus[..] {
                [gpu] => Box::new(GpuBackend::new(
                    model,
                    &with_images()?,
                    GpuPart::whole(gpu.clone()),
                )),
                gpus => Box::new(RanksBackend::planned_on_gpus(model, &with_images()?, gpus)),
            },
            Self::Assumed(bytes) => Box::new(AssumedGpu::new(model, &with_images()?, *bytes)),
            Self::Cpu(budgets) => match &budgets[..] {
                [budget] => Box::new(cpu(model, settings, budget)?),
                budgets => Box::new(cpu_ranks(model, settings, budgets)?),
            },
        })
    }
}

/// Opens the device that the settings ask for, and says in the log which it is and why. Nobody else may measure it until the
/// lock is dropped, which is to be kept until this process has taken all that it will ever take.
///
/// # Errors
/// Where a GPU was asked for and cannot be used, flags do not suit the device, or another start works on it.
pub fn open(
    source: &Source,
    settings: &Arc<EngineSettings>,
) -> Result<(Arc<dyn Backend>, DeviceLock), Error> {
    let Source::Files { model, .. } = source else {
        tracing::info!("device: cpu");
        terminal::phase("device", "simulated");
        return Ok((Arc::new(simulated(settings)?), DeviceLock::none()));
    };
    let numbers = numbers(settings)?;
    if settings.device != DeviceChoice::Cpu {
        open_libraries();
    }
    // What keeps a GPU from having a name keeps it from being opened too, which says so.
    let uuids = numbers.iter().map(|&ordinal| cuda::uuid(ordinal));
    let gpu_lock = match uuids.collect::<Result<Vec<_>, _>>() {
        Ok(uuids) => settings.locks.take_all(&uuids)?,
        Err(_) => DeviceLock::none(),
    };
    let Chosen { gpus, why } = choose(
        &settings.device,
        &numbers,
        |ordinal| open_gpu(ordinal, settings),
        holders,
    )?;
    if !gpus.is_empty() {
        check_gpu(settings)?;
        for gpu in &gpus {
            let info = gpu.info();
            let (major, minor) = info.compute_capability;
            let (ordinal, name, bytes) = (info.ordinal, &info.name, Bytes(gpu.budget().meters().total));
            tracing::info!("device: cuda:{ordinal}, {name}, compute capability {major}.{minor}, {bytes}");
            terminal::phase("device", format_args!("cuda:{ordinal}, {name}, {bytes}"));
        }
        let settings = images::settings_of(model, settings)?;
        let backend: Arc<dyn Backend> = match &gpus[..] {
            [gpu] => Arc::new(GpuBackend::new(model, &settings, GpuPart::whole(gpu.clone()))),
            gpus => {
                let exchanges = Exchange::group(gpus.len());
                Arc::new(RanksBackend::on_gpus(model, &settings, gpus, exchanges)?)
            }
        };
        return Ok((backend, gpu_lock));
    }
    drop(gpu_lock);
    check_cpu(settings)?;
    let why = match why {
        None => String::new(),
        Some(GpuError::NoDriver) => " (no NVIDIA driver)".to_owned(),
        Some(GpuError::NoDevice { .. }) => " (no NVIDIA GPU)".to_owned(),
        Some(why) => format!(" ({why})"),
    };
    tracing::info!("device: cpu{why}");
    if let Some(warning) = beyond_machine(settings, Machine::this().size()) {
        tracing::warn!("{warning}");
    }
    let lock = settings.locks.take("cpu")?;
    let budgets = cpu_budgets(settings)?;
    let bytes = Bytes(total(&budgets));
    let backend: Arc<dyn Backend> = match &budgets[..] {
        [budget] => {
            terminal::phase("device", format_args!("cpu{why}, {bytes}"));
            Arc::new(cpu(model, settings, budget)?)
        }
        budgets => {
            let ranks = budgets.len();
            tracing::info!("tensor parallelism: {ranks} ranks on threads of the CPU");
            terminal::phase("device", format_args!("cpu{why}, {bytes} for {ranks} ranks"));
            Arc::new(cpu_ranks(model, settings, budgets)?)
        }
    };
    Ok((backend, lock))
}

/// All of a model on the CPU.
fn cpu(model: &Path, settings: &Arc<EngineSettings>, budget: &Budget) -> Result<CpuBackend, Error> {
    let settings = images::settings_of(model, settings)?;
    Ok(CpuBackend::new(model, &settings, CpuRank::whole(budget.clone())))
}

/// A part of it for each budget.
fn cpu_ranks(
    model: &Path,
    settings: &Arc<EngineSettings>,
    budgets: &[Budget],
) -> Result<RanksBackend, Error> {
    let settings = images::settings_of(model, settings)?;
    let group = Exchange::group(budgets.len());
    let ranks = budgets.iter().zip(group).map(|(budget, exchange)| {
        let exchange = Arc::new(Mutex::new(exchange));
        let rank = CpuRank::part(budget.clone(), Arc::clone(&exchange)).map_err(Error::WeightsDoNotFit)?;
        let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(model, &settings, rank));
        Ok((backend, exchange))
    });
    Ok(RanksBackend::new(ranks.collect::<Result<_, Error>>()?))
}

/// The simulated device is nobody else's.
fn simulated(settings: &Arc<EngineSettings>) -> Result<SimBackend, Error> {
    if let DeviceChoice::Cuda | DeviceChoice::Gpus(_) = settings.device {
        return Err(Error::configuration(
            "--device",
            "the simulated model runs on the CPU",
        ));
    }
    if settings.tensor_parallel_size > 1 {
        return Err(Error::configuration(
            "--tensor-parallel-size",
            "the simulated model has no parts: leave the flag out",
        ));
    }
    check_cpu(settings)?;
    let bytes = settings.device_memory.unwrap_or(SIM_BYTES);
    Ok(SimBackend::new(settings, Budget::new(bytes)))
}

/// Numbers of the GPUs to look for.
///
/// # Errors
/// Where they are not as many as ranks.
fn numbers(settings: &EngineSettings) -> Result<Vec<usize>, Error> {
    let numbers = settings.device.gpus(settings.tensor_parallel_size);
    numbers.map_err(|why| Error::configuration("--device", why))
}

fn open_gpu(ordinal: usize, settings: &EngineSettings) -> Result<Gpu, GpuError> {
    let options = GpuOptions {
        limit: limit(settings),
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

/// What a choice came to.
#[derive(Debug)]
struct Chosen<G> {
    /// The GPUs, one for each rank; without any it is the CPU.
    gpus: Vec<G>,
    /// Why there is none, where one was looked for.
    why: Option<GpuError>,
}

/// Follows `choice`, of GPUs of these numbers; `open` gives the GPU of a number ready for use.
fn choose<G>(
    choice: &DeviceChoice,
    numbers: &[usize],
    mut open: impl FnMut(usize) -> Result<G, GpuError>,
    holders: impl FnOnce(usize) -> Vec<Holder>,
) -> Result<Chosen<G>, Error> {
    let mut gpus = Vec::new();
    for &ordinal in numbers {
        match open(ordinal) {
            Ok(gpu) => gpus.push(gpu),
            Err(why) if *choice == DeviceChoice::Auto && gpus.is_empty() && is_absent(&why) => {
                let why = Some(why);
                return Ok(Chosen { gpus, why });
            }
            // A model that is made for a GPU would take minutes for an answer on a CPU: nobody wants that unasked.
            Err(error) if error.is_out_of_memory() => {
                return Err(Error::GpuFull {
                    ordinal,
                    holders: holders(ordinal),
                    error,
                });
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Chosen { gpus, why: None })
}

/// Whether there is no GPU, or none that this binary was made for.
fn is_absent(error: &GpuError) -> bool {
    matches!(
        error,
        GpuError::NoDriver | GpuError::NoDevice { .. } | GpuError::NoKernels
    )
}

fn limit(settings: &EngineSettings) -> GpuLimit {
    match (settings.device_memory, settings.gpu_memory_utilization) {
        (Some(bytes), _) => GpuLimit::Bytes(bytes),
        (None, Some(fraction)) => GpuLimit::Fraction(fraction.get()),
        (None, None) => GpuLimit::All,
    }
}

/// What `--device-memory` grants to each rank, or an equal part of what this machine can spare.
fn cpu_budgets(settings: &EngineSettings) -> Result<Vec<Budget>, Error> {
    let ranks = settings.tensor_parallel_size;
    let bytes = match settings.device_memory {
        Some(bytes) => bytes.saturating_mul(ranks as u64),
        None => {
            let capacity = capacity::default_capacity()?;
            tracing::info!("device memory: {}, {}", Bytes(capacity.bytes), capacity.bound);
            capacity.bytes
        }
    };
    let machine = Arc::new(Machine::this());
    Ok(match ranks {
        1 => vec![Budget::shared(bytes, machine)],
        ranks => Budget::divided(bytes, ranks, machine),
    })
}

/// As [`cpu_budgets`], to plan with. More than this machine has is the memory of another one, of which other processes hold nothing.
fn planned_budgets(settings: &EngineSettings) -> Result<Vec<Budget>, Error> {
    let beyond = beyond_machine(settings, Machine::this().size());
    match settings.device_memory.filter(|_| beyond.is_some()) {
        None => cpu_budgets(settings),
        Some(bytes) => Ok((0..settings.tensor_parallel_size)
            .map(|_| Budget::new(bytes))
            .collect()),
    }
}

fn total(budgets: &[Budget]) -> u64 {
    budgets.iter().map(|budget| budget.meters().total).sum()
}

/// Refuses what only a CPU can do.
fn check_gpu(settings: &EngineSettings) -> Result<(), Error> {
    if !matches!(settings.tensor_parallel_size, 1 | 2 | 4 | 8) {
        return Err(Error::configuration(
            "--tensor-parallel-size",
            "a model is served by 1, 2, 4 or 8 GPUs; --device cpu has other numbers too",
        ));
    }
    if !matches!(settings.dtype, DType::Auto | DType::Bfloat16) {
        return Err(Error::configuration(
            "--dtype",
            "a GPU computes in bfloat16, with sums in float32; give auto or bfloat16, or --device cpu",
        ));
    }
    match settings.kv_cache_dtype {
        KvDtype::Auto | KvDtype::Bfloat16 | KvDtype::Fp8 => {}
        KvDtype::Float16 | KvDtype::Float32 => {
            return Err(Error::configuration(
                "--kv-cache-dtype",
                "the KV cache of a GPU is bfloat16 or fp8; give auto, bfloat16 or fp8, or --device cpu",
            ));
        }
    }
    if settings.threads.is_some() {
        return Err(Error::configuration(
            "--threads",
            "compute threads are for --device cpu",
        ));
    }
    Ok(())
}

/// Refuses what only a GPU can do.
fn check_cpu(settings: &EngineSettings) -> Result<(), Error> {
    match settings.kv_cache_dtype {
        KvDtype::Auto | KvDtype::Float16 | KvDtype::Float32 => {}
        KvDtype::Bfloat16 | KvDtype::Fp8 => {
            return Err(Error::configuration(
                "--kv-cache-dtype",
                "the KV cache of a CPU is float16 or float32; bfloat16 and fp8 need a GPU",
            ));
        }
    }
    if settings.gpu_memory_utilization.is_some() {
        return Err(Error::configuration(
            "--gpu-memory-utilization",
            "there is no GPU in use; --device-memory limits the memory of a CPU",
        ));
    }
    Ok(())
}

/// What to say where the flag promises more than the `size` of this machine, in bytes. It is no error: what is not there is taken
/// for memory of other processes.
fn beyond_machine(settings: &EngineSettings, size: Option<u64>) -> Option<String> {
    let asked = settings
        .device_memory?
        .saturating_mul(settings.tensor_parallel_size as u64);
    let size = size.filter(|&size| asked > size)?;
    Some(format!(
        "--device-memory grants {}, but this machine has {}: what it lacks counts as memory of other processes",
        Bytes(asked),
        Bytes(size)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::tests::settings;

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
    fn more_memory_than_the_machine_has_is_told() {
        let told = |flags: &str| beyond_machine(&settings(flags), Some(16 << 30));
        assert_eq!(told("--device-memory 16GiB"), None);
        assert_eq!(told(""), None);
        let warning = told("--device-memory 9GiB --tensor-parallel-size 2").unwrap();
        assert!(
            warning.contains("grants 18.00 GiB, but this machine has 16.00 GiB"),
            "{warning}"
        );
    }

    #[test]
    fn auto_takes_the_first_gpu_that_can_be_used() {
        let chosen = choose(&DeviceChoice::Auto, &[0], Ok, nobody).unwrap();
        assert_eq!((chosen.gpus, chosen.why), (vec![0], None));
        let both = choose(&DeviceChoice::Auto, &[0, 1], Ok, nobody).unwrap();
        assert_eq!(both.gpus, [0, 1]);
        // Fewer than were asked for are no reason to take the CPU.
        let one_of = |ordinal| match ordinal {
            0 => Ok(0),
            ordinal => Err(GpuError::NoDevice { ordinal, count: 1 }),
        };
        let error = choose(&DeviceChoice::Auto, &[0, 1], one_of, nobody).unwrap_err();
        assert!(error.to_string().contains("there is no GPU 1"), "{error}");
        let reasons = [
            GpuError::NoDriver,
            GpuError::NoDevice { ordinal: 0, count: 0 },
            GpuError::NoKernels,
        ];
        for why in reasons {
            let chosen = choose::<()>(&DeviceChoice::Auto, &[0], |_| Err(why.clone()), nobody).unwrap();
            assert_eq!((chosen.gpus.len(), chosen.why), (0, Some(why)));
        }
        // One that is there and cannot be used is no reason to be a hundred times slower.
        let broken = GpuError::Call {
            call: "cuInit",
            code: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH".into(),
            message: String::new(),
        };
        for why in [old(), broken] {
            let error = choose::<()>(&DeviceChoice::Auto, &[0], |_| Err(why.clone()), nobody).unwrap_err();
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
        for choice in [DeviceChoice::Auto, DeviceChoice::Cuda] {
            let open = |_| Err::<(), _>(full.clone());
            let error = choose(&choice, &[0], open, |_| vec![holder.clone()]).unwrap_err();
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
            let error = choose(&choice, &[0], open, nobody).unwrap_err();
            assert!(error.to_string().contains("nvidia-smi"), "{error}");
        }
    }

    #[test]
    fn a_gpu_that_was_asked_for_is_that_gpu_or_an_error() {
        let third = DeviceChoice::Gpus(vec![3]);
        assert_eq!(choose(&third, &[3], Ok, nobody).unwrap().gpus, [3]);
        let error = choose::<()>(&DeviceChoice::Cuda, &[0], |_| Err(old()), nobody).unwrap_err();
        assert!(error.to_string().contains("7.5"), "{error}");
        assert_eq!(error.exit_code(), 7);
        let never = |_| -> Result<(), _> { panic!("the CPU needs no GPU") };
        assert!(
            choose(&DeviceChoice::Cpu, &[], never, nobody)
                .unwrap()
                .gpus
                .is_empty()
        );
    }

    #[test]
    fn flags_that_do_not_suit_the_device_are_refused_by_name() {
        let on_gpu = [
            ("--dtype float16", "--dtype"),
            ("--dtype float32", "--dtype"),
            ("--kv-cache-dtype float16", "--kv-cache-dtype"),
            ("--threads 2", "--threads"),
            ("--tensor-parallel-size 3", "--tensor-parallel-size"),
        ];
        let on_cpu = [
            ("--kv-cache-dtype bfloat16", "--kv-cache-dtype"),
            ("--kv-cache-dtype fp8", "--kv-cache-dtype"),
            ("--gpu-memory-utilization 0.5", "--gpu-memory-utilization"),
        ];
        let refused = |result: Result<(), Error>, flag: &str| {
            let error = result.unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().starts_with(flag), "{error}");
        };
        for (flags, flag) in on_gpu {
            refused(check_gpu(&settings(flags)), flag);
        }
        for (flags, flag) in on_cpu {
            refused(check_cpu(&settings(flags)), flag);
        }
        check_gpu(&settings(
            "--dtype bfloat16 --kv-cache-dtype bfloat16 --enforce-eager",
        ))
        .unwrap();
        check_gpu(&settings("--kv-cache-dtype fp8")).unwrap();
        check_gpu(&settings("--tensor-parallel-size 4")).unwrap();
        check_gpu(&settings("--kv-cache-dtype fp8_e4m3")).unwrap();
        check_cpu(&settings("--kv-cache-dtype float32 --threads 2 --enforce-eager")).unwrap();
        for flags in ["", "--dtype auto --kv-cache-dtype auto"] {
            check_gpu(&settings(flags)).unwrap();
            check_cpu(&settings(flags)).unwrap();
        }
    }

    #[test]
    fn a_limit_is_in_bytes_or_a_part() {
        assert_eq!(limit(&settings("")), GpuLimit::All);
        assert_eq!(limit(&settings("--device-memory 8GiB")), GpuLimit::Bytes(8 << 30));
        assert_eq!(
            limit(&settings("--gpu-memory-utilization 0.9")),
            GpuLimit::Fraction(0.9)
        );
    }

    #[test]
    fn the_simulated_model_needs_no_gpu() {
        let (device, lock) = open(&Source::Sim, &Arc::new(settings("sim"))).unwrap();
        assert!(!lock.is_held(), "the simulated device is this process's own");
        assert_eq!(device.meters().total, SIM_BYTES);
        let error = open(&Source::Sim, &Arc::new(settings("sim --device cuda"))).unwrap_err();
        assert_eq!(error.exit_code(), 2);
    }
}
