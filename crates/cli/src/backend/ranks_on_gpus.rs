//! A GPU for each rank.

use std::path::Path;
use std::sync::{Arc, Mutex};

use plimsoll_device::cuda::{DeviceError, Gpu};
use plimsoll_kernels::Exchange;
use plimsoll_kernels::cuda::{AllReduce, AllReducePath};
use plimsoll_model::Shard;
use plimsoll_model::cuda::RankLink;

use super::{Backend, GpuBackend, GpuPart, RanksBackend, SharedExchange};
use crate::error::Error;
use crate::settings::EngineSettings;

impl RanksBackend {
    /// Ranks on GPUs, one each, in order, whose threads meet at `exchanges`. What the GPUs exchange sums in is there from now on:
    /// before anything is measured.
    ///
    /// # Errors
    /// Where GPUs are of different kinds, cannot exchange data, or lack the memory for that.
    ///
    /// # Panics
    /// If there are not two, four or eight GPUs, or not as many exchanges.
    pub fn on_gpus(
        model: &Path,
        settings: &Arc<EngineSettings>,
        gpus: &[Gpu],
        exchanges: Vec<Exchange>,
    ) -> Result<Self, Error> {
        check_alike(gpus)?;
        assert_eq!(gpus.len(), exchanges.len(), "a GPU for each rank");
        let group = AllReduce::group(gpus, AllReducePath::Peers).map_err(|error| match error {
            DeviceError::Oom(oom) => Error::WeightsDoNotFit(oom),
            DeviceError::Gpu(error) => Error::Gpu(error),
        })?;
        let report = group[0].report();
        report
            .lines()
            .for_each(|line| tracing::debug!("sums over GPUs: {line}"));
        let ways = report.lines().last().unwrap_or_default();
        tracing::info!("tensor parallelism: {} GPUs, sums by {ways}", gpus.len());
        let parts = group.into_iter().zip(exchanges).map(|(all_reduce, exchange)| {
            let exchange = Arc::new(Mutex::new(exchange));
            let link = RankLink {
                all_reduce: Arc::new(all_reduce),
                exchange: Arc::clone(&exchange),
            };
            (exchange, Some(link))
        });
        Ok(Self::new(parts_on(model, settings, gpus, parts)))
    }

    /// The same ranks, to be planned for alone: they are not connected.
    pub(super) fn planned_on_gpus(model: &Path, settings: &Arc<EngineSettings>, gpus: &[Gpu]) -> Self {
        let exchanges = Exchange::group(gpus.len()).into_iter();
        let parts = exchanges.map(|exchange| (Arc::new(Mutex::new(exchange)), None));
        Self::new(parts_on(model, settings, gpus, parts))
    }
}

fn parts_on(
    model: &Path,
    settings: &Arc<EngineSettings>,
    gpus: &[Gpu],
    parts: impl Iterator<Item = (SharedExchange, Option<RankLink>)>,
) -> Vec<(Arc<dyn Backend>, SharedExchange)> {
    let ranks = gpus.len();
    let parts = gpus.iter().zip(parts).enumerate();
    let parts = parts.map(|(rank, (gpu, (exchange, link)))| {
        let part = GpuPart::part(gpu.clone(), Shard { rank, ranks }, link);
        let backend: Arc<dyn Backend> = Arc::new(GpuBackend::new(model, settings, part));
        (backend, exchange)
    });
    parts.collect()
}

/// Ranks choose alike only among the same kernels, and for one that is slower all others wait.
///
/// # Errors
/// Where GPUs are of different kinds.
pub(super) fn check_alike(gpus: &[Gpu]) -> Result<(), Error> {
    let kind = |gpu: &Gpu| {
        let info = gpu.info();
        (info.name.clone(), info.compute_capability, info.sm_count)
    };
    let Some(first) = gpus.first() else { return Ok(()) };
    match gpus.iter().find(|gpu| kind(gpu) != kind(first)) {
        None => Ok(()),
        Some(other) => Err(Error::configuration(
            "--device",
            format!(
                "cuda:{} is of another kind ({}) than cuda:{} ({}): name GPUs of one kind",
                other.info().ordinal,
                other.info().name,
                first.info().ordinal,
                first.info().name
            ),
        )),
    }
}
