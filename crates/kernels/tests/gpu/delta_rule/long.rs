//! Contexts of 32k and more beside the recurrence in `f64`.

use plimsoll_kernels::cuda::DeltaKernels;
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::{BF16, BF16_KEYS, CHUNKS, Case, Cuts, Layer, OnCpu, OnGpu, layout};
use crate::common::{assert_close, gpu, rng};

const TOKENS: usize = (32 << 10) + 1000;
/// Tokens at the end that are compared by themselves: what has added up is largest there.
const LATE: usize = 512;

/// One request of one head of q and k. Its heads of v remember everything, or forget within thousands of tokens, hundreds or one:
/// rounding adds up for longest in the first.
fn case(rng: &mut StdRng, dim: usize) -> Case {
    let mut case = Case::new(rng, layout([1, 4, dim, dim, 4]), &[TOKENS]);
    case.a_log = vec![-20.0, -9.0, -4.0, 1.0];
    case
}

/// In steps as a server cuts them.
fn serve<L: Layer>(case: &Case, rng: &mut StdRng, layer: &mut L, cuts: Cuts) -> [Vec<f32>; 2] {
    let served = case.serve(rng, layer, cuts).remove(0);
    [served.out, served.head_states]
}

fn check(what: &str, case: &Case, [out, states]: &[Vec<f32>; 2], exact: &[Vec<f64>; 2], of_states: f64) {
    let [exact_out, exact_states] = exact;
    assert_close(&format!("{what}: outputs"), out, exact_out, BF16);
    let late = (TOKENS - LATE) * case.layout.values();
    assert_close(
        &format!("{what}: the last outputs"),
        &out[late..],
        &exact_out[late..],
        BF16,
    );
    // Each by itself, lest one that remembers everything hide the others.
    let elements = case.layout.key_dim * case.layout.value_dim;
    let heads = states.chunks(elements).zip(exact_states.chunks(elements));
    for (head, (states, exact)) in heads.enumerate() {
        assert_close(&format!("{what}: state of head {head}"), states, exact, of_states);
    }
}

#[test]
fn long_contexts_on_the_cpu() {
    let mut rng = rng("long contexts of the delta rule on the CPU");
    let case = case(&mut rng, 16);
    let found = serve(&case, &mut rng, &mut OnCpu::new(&case), Cuts::anywhere(2048));
    let exact = case.exact(&case.requests[0], OnCpu::rounded);
    check("CPU", &case, &found, &exact, OnCpu::STATES);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn long_contexts() {
    let (gpu, mut rng) = (gpu(), rng("long contexts of the delta rule"));
    let kernels = DeltaKernels::load(&gpu).unwrap();
    let case = case(&mut rng, 128);
    let multiple = kernels.chunk(&case.layout);
    let exact = case.exact(&case.requests[0], OnGpu::rounded);
    // All of it a prompt, which is computed in chunks, or none of it.
    let [chunks, single] = [(1.0, "in chunks"), (0.0, "token by token")].map(|(prompt, what)| {
        let mut layer = OnGpu::new(&gpu, &kernels, &case, StdRng::from_rng(&mut rng));
        let cuts = Cuts {
            most: 8192,
            multiple,
            prompt,
        };
        let found = serve(&case, &mut rng, &mut layer, cuts);
        check(what, &case, &found, &exact, BF16_KEYS);
        found
    });
    let single: Vec<f64> = single[1].iter().copied().map(f64::from).collect();
    assert_close("chunks beside single tokens", &chunks[1], &single, CHUNKS);
}
