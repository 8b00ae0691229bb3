//! Whole layers of one row beside the kernels that compute them otherwise.

use half::bf16;
use plimsoll_device::cuda::Gpu;
use plimsoll_kernels::CachedValues;
use plimsoll_kernels::cuda::{
    DecodeArgs, DecodeItem, DecodeKernels, FusedKernels, GpuAttentionOptions, GpuChain, GpuKvWrite, Linears,
};

use super::{Case, Memory, SIZES, State, TOLERANCE, part, slot_of};
use crate::common;

/// Rotation, attention and `linear_chain.cu`, and what attention works with.
struct Apart<'a> {
    linears: &'a Linears,
    fused: FusedKernels,
    decode: DecodeKernels,
}

impl Apart<'_> {
    /// What one layer leaves behind.
    fn run(&self, gpu: &Gpu, case: &Case, memory: &Memory, at: usize, before: &State) -> State {
        memory.put(gpu, before);
        let (size, layer) = (case.size, &case.layers[at]);
        let kv = memory.kv(case, at);
        let projected = part::<bf16>(&memory.projected, case.projected.len());
        self.fused
            .qk_norm_rope_kv_write(
                projected,
                memory.qk_norm(case, at),
                memory.rope(case),
                GpuKvWrite {
                    kv,
                    slots: part(&memory.place.slot, 1),
                    kv_heads: size.kv_heads,
                    block_size: case.layout.block_size.tokens(),
                    head_dim: size.head_dim,
                    gated: false,
                    values: CachedValues::Projected,
                },
            )
            .expect("a launch");
        let planner = self
            .decode
            .planner(case.layout, size.heads, None, 1)
            .expect("a planner");
        let mut items = vec![DecodeItem::default(); planner.max_items()];
        let header = planner.plan(std::iter::once((0, case.cached + 1)), &mut items);
        let (header, items) = (common::upload(gpu, &[header]), common::upload(gpu, &items));
        let counters = common::upload(gpu, &vec![0u32; planner.counters()]);
        let scratch = common::poisoned::<f32>(gpu, planner.scratch_floats());
        let attended = common::poisoned::<bf16>(gpu, size.heads * size.head_dim);
        let activated = common::poisoned::<bf16>(gpu, size.inner);
        self.decode
            .forward(
                &planner,
                &DecodeArgs {
                    q: projected,
                    q_stride: case.projected.len(),
                    kv,
                    runs: part(&memory.place.run, 1),
                    blocks: part(&memory.blocks, 1 + case.blocks.len()),
                    header: part(&header, 1),
                    items: part(&items, planner.max_items()),
                    out: part(&attended, size.heads * size.head_dim),
                    scratch: part(&scratch, planner.scratch_floats()),
                    counters: part(&counters, planner.counters()),
                    options: GpuAttentionOptions {
                        scale: case.scale(),
                        soft_cap: None,
                        sinks: None,
                    },
                },
            )
            .expect("a launch");
        self.linears
            .forward_chain(&GpuChain {
                x: part(&attended, size.heads * size.head_dim),
                output: &layer.output.device,
                hidden: part(&memory.hidden, size.width),
                norm: memory.norm(case, at, 1),
                gate_up: &layer.gate_up.device,
                activation: case.activation,
                activated: part(&activated, size.inner),
                down: &layer.down.device,
                sum_norms: None,
                next: memory.next(case, at + 1),
            })
            .expect("a launch");
        memory.state(gpu, case)
    }
}

/// Layer by layer from the same inputs: so only what one layer rounds otherwise can differ.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn whole_layers_are_what_separate_kernels_compute() {
    let Some(gpu) = common::hopper() else { return };
    let linears = crate::linear::linears(&gpu);
    let apart = Apart {
        linears: &linears,
        fused: FusedKernels::load(&gpu).expect("kernels for this GPU"),
        decode: DecodeKernels::load(&gpu).expect("kernels for this GPU"),
    };
    let mut rng = common::rng("whole_layers_are_what_separate_kernels_compute");
    for (size, cached) in [
        (SIZES[0], 0),
        (SIZES[0], 1),
        (SIZES[0], 250),
        (SIZES[0], 3000),
        (SIZES[0], 9000),
        (SIZES[2], 250),
        (SIZES[2], 3000),
        (SIZES[3], 1000),
    ] {
        let mut case = Case::random(&gpu, &mut rng, size, cached, 3);
        // Attention of its own reads the current token from the cache.
        case.slot = slot_of(&case.blocks, case.layout.block_size.tokens(), cached);
        let memory = Memory::new(&gpu, &case);
        let mut state = case.state();
        for at in 0..case.layers.len() {
            let want = apart.run(&gpu, &case, &memory, at, &state);
            let found = memory.run(&gpu, &linears, &case, at..at + 1, &state);
            let close = |part: &str, found: &[bf16], want: &[bf16]| {
                let what = format!("{}: {part} of layer {at}", case.what);
                common::assert_close(&what, &common::widen(found), &common::wide(want), TOLERANCE);
            };
            close("residual stream", &found.hidden, &want.hidden);
            if at + 1 < case.layers.len() {
                close("what follows", &found.projected, &want.projected);
            }
            for (name, which) in [("keys", 0), ("values", 1)] {
                let [found, want] = [&found, &want].map(|state| {
                    let cache = &state.caches[at][which];
                    let known = cache.iter().filter(|x| !x.is_nan());
                    known.copied().collect::<Vec<_>>()
                });
                close(name, &found, &want);
            }
            state = found;
        }
    }
}
