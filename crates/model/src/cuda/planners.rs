//! How attention's work is cut up.

use plimsoll_core::BlockSize;
use plimsoll_device::cuda::GpuError;
use plimsoll_kernels::KvLayout;
use plimsoll_kernels::cuda::{DecodeKernels, DecodePlanner, GpuKvElement, PrefillKernels, PrefillPlanner};

use crate::DecoderSpec;
use crate::spec::AttentionSpec;
use crate::tables::LayerPage;

/// How attention's work is cut up: one entry per kind of attention that layers have.
pub(super) type Planners = Vec<AttentionPlanners>;

/// What a work list of attention depends on beside the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AttentionKind {
    pub(super) layout: KvLayout,
    pub(super) heads: usize,
    pub(super) window: Option<usize>,
    /// Of the cache.
    pub(super) element: GpuKvElement,
}

impl AttentionKind {
    pub(super) fn of(spec: &AttentionSpec, block_size: BlockSize, element: GpuKvElement) -> Self {
        Self {
            layout: KvLayout {
                kv_heads: spec.kv_heads,
                head_dim: spec.head_dim,
                block_size,
            },
            heads: spec.heads,
            window: spec.window,
            element,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionPlanners {
    pub(super) kind: AttentionKind,
    pub(super) decode: DecodePlanner,
    pub(super) prefill: PrefillPlanner,
}

/// Floats of scratch that attention needs in any step.
pub(super) fn attention_scratch(planners: &[AttentionPlanners]) -> usize {
    let most = |planners: &AttentionPlanners| {
        planners
            .decode
            .scratch_floats()
            .max(planners.prefill.scratch_floats())
    };
    planners.iter().map(most).max().unwrap_or(0)
}

/// Counters that the attention of decoding runs needs.
pub(super) fn attention_counters(planners: &[AttentionPlanners]) -> usize {
    let all = planners.iter().map(|planners| planners.decode.counters());
    all.max().unwrap_or(0)
}

/// One entry for every kind of attention that layers have, whose keys and values are in `pages`.
pub(super) fn planners<E>(
    spec: &DecoderSpec,
    pages: &[LayerPage],
    element: GpuKvElement,
    planner: impl Fn(AttentionKind) -> Result<AttentionPlanners, E>,
) -> Result<Planners, E> {
    let mut planners = Planners::new();
    for (spec, page) in spec.attention().zip(pages) {
        let kind = AttentionKind::of(spec, page.slice_size, element);
        if planners.iter().all(|known| known.kind != kind) {
            planners.push(planner(kind)?);
        }
    }
    Ok(planners)
}

/// On the GPU that has these kernels.
pub(super) fn planners_on(
    decode: &DecodeKernels,
    prefill: &PrefillKernels,
    kind: AttentionKind,
    max_runs: usize,
) -> Result<AttentionPlanners, GpuError> {
    Ok(AttentionPlanners {
        kind,
        decode: decode.planner(kind.layout, kind.heads, kind.window, max_runs)?,
        prefill: prefill.planner(kind.layout, kind.heads, kind.window, kind.element)?,
    })
}
