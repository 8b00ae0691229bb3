//! Timing that all benchmarks share.

use half::bf16;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlice};
use plimsoll_kernels::cuda::{GpuAttentionOptions, GpuKv, GpuKvElement};

/// Bytes per second one H200 reads, measured.
pub(crate) const READ_BANDWIDTH: f64 = 4.04e12;
/// Dense bf16 operations per second of one H200, measured on random data.
pub(crate) const BF16_RATE: f64 = 790e12;

/// Attention of most families.
pub(crate) fn plain(head_dim: usize) -> GpuAttentionOptions<'static> {
    GpuAttentionOptions {
        scale: 1.0 / (head_dim as f32).sqrt(),
        soft_cap: None,
        sinks: None,
    }
}

/// A cache of 16 bits and blocks of so many elements.
pub(crate) fn wide<'a>(k: GpuSlice<'a, bf16>, v: GpuSlice<'a, bf16>, block_stride: usize) -> GpuKv<'a> {
    GpuKv {
        k: k.cast(),
        v: v.cast(),
        block_stride,
        element: GpuKvElement::Bf16,
        k_scale: 1.0,
        v_scale: 1.0,
    }
}

/// Median microseconds of one call of `op`, which gets the index of the call (to rotate buffers past the L2 cache):
/// `calls` of them in one CUDA graph, replayed.
pub(crate) fn time_us(gpu: &Gpu, calls: usize, op: impl FnMut(usize) -> Result<(), GpuError>) -> f64 {
    time_replays_us(gpu, calls, false, op)
}

/// As [`time_us`]; each measured replay may follow one that is not, in which ranks of several GPUs have met.
pub(crate) fn time_replays_us(
    gpu: &Gpu,
    calls: usize,
    meet: bool,
    mut op: impl FnMut(usize) -> Result<(), GpuError>,
) -> f64 {
    op(0).expect("a warm-up");
    gpu.synchronize().expect("the warm-up ends");
    let graph = gpu
        .capture(|| (0..calls).try_for_each(&mut op))
        .expect("a capture");
    let (start, end) = (gpu.event().expect("an event"), gpu.event().expect("an event"));
    let mut times: Vec<f32> = (0..9)
        .map(|_| {
            if meet {
                graph.launch().expect("a launch");
            }
            start.record().expect("a record");
            graph.launch().expect("a launch");
            end.record().expect("a record");
            end.synchronize().expect("the replay ends");
            start.elapsed_ms(&end).expect("both are recorded")
        })
        .collect();
    times.sort_unstable_by(f32::total_cmp);
    f64::from(times[times.len() / 2]) * 1e3 / calls as f64
}
