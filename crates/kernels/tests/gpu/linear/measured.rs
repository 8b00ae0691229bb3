//! Choices that are measured, and taken over from another measurement.

use std::cell::Cell;

use half::bf16;
use plimsoll_device::cuda::{Gpu, GpuSlab, GpuSlice};
use plimsoll_kernels::Activation;
use plimsoll_kernels::cuda::{
    AddNormed, ChainUse, FusedKernels, GpuLinear, GpuNorm, LinearOutput, LinearScratch, LinearUse,
    LinearWays, Linears, StaleWays,
};
use rand::rngs::StdRng;

use super::{Case, check, linears};
use crate::common;

/// Rows that are measured, and others between and behind them.
const ROWS: [usize; 5] = [1, 8, 32, 64, 256];
const CHECKED_ROWS: [usize; 8] = [1, 5, 8, 30, 33, 100, 256, 300];
const N: usize = 1040;
const K: usize = 512;

/// A layer, and device memory to measure it in.
struct Bench {
    case: Case,
    layer: GpuLinear,
    x: GpuSlab,
    out: GpuSlab,
}

impl Bench {
    fn random(gpu: &Gpu, rng: &mut StdRng) -> Self {
        let case = Case::random(rng, 1, N, K, false);
        Self {
            layer: case.layer(gpu),
            case,
            x: common::poisoned::<bf16>(gpu, 256 * K),
            out: common::poisoned::<f32>(gpu, 256 * N),
        }
    }

    fn scratch(&self) -> LinearScratch<'_> {
        LinearScratch {
            x: self.x.slice(),
            out: self.out.slice(),
            weights: self.x.slice().range(0..0),
        }
    }

    /// Calls `run` with gate and up, unfused and fused, and logits.
    fn with_uses<T>(&self, rows: &[usize], run: impl FnOnce(&[LinearUse<'_>]) -> T) -> T {
        let layers = [&self.layer];
        let outputs = [LinearOutput::Glu(Activation::Silu), LinearOutput::F32];
        run(&outputs.map(|output| LinearUse {
            layers: &layers,
            output,
            rows,
        }))
    }

    /// Checks the products of all these numbers of rows.
    fn check(&self, gpu: &Gpu, linears: &Linears, rng: &mut StdRng, what: &str) {
        for m in CHECKED_ROWS {
            let case = Case {
                m,
                x: common::random(rng, m * K),
                ..self.case.clone()
            };
            check(gpu, linears, &case, what);
        }
    }
}

/// Whatever is measured to be fastest, for the measured numbers of rows and those between.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn measured_choices() {
    let gpu = common::gpu();
    let mut rng = common::rng("linear, measured");
    let mut linears = linears(&gpu);
    let bench = Bench::random(&gpu, &mut rng);
    let measured = bench.with_uses(&ROWS, |uses| linears.measure(uses, bench.scratch()));
    measured.expect("measurements");
    // Unfused and fused gate and up, and logits.
    let choices = linears.choices();
    assert_eq!(choices.len(), 3 * ROWS.len(), "{choices:?}");
    bench.check(&gpu, &linears, &mut rng, "measured");
}

/// Who takes over what another measured chooses as that one did, or takes over nothing.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn measured_choices_are_taken_over() {
    let gpu = common::gpu();
    let mut rng = common::rng("linear, taken over");
    let bench = Bench::random(&gpu, &mut rng);
    let mut measured = linears(&gpu);
    let done = bench.with_uses(&ROWS, |uses| measured.measure(uses, bench.scratch()));
    done.expect("measurements");
    let json = serde_json::to_value(measured.ways()).unwrap();

    let mut linears = linears(&gpu);
    let take_over = |linears: &mut Linears, json: &serde_json::Value, rows: &[usize]| {
        let ways: LinearWays = serde_json::from_value(json.clone()).unwrap();
        bench.with_uses(rows, |uses| linears.take_over(&ways, uses, bench.scratch()))
    };
    take_over(&mut linears, &json, &ROWS).expect("the same GPU");
    assert_eq!(linears.choices(), measured.choices());
    bench.check(&gpu, &linears, &mut rng, "taken over");

    linears.forget();
    let mut fails = |json: &serde_json::Value, rows: &[usize]| {
        let stale = take_over(&mut linears, json, rows).unwrap_err();
        assert!(linears.choices().is_empty(), "{stale}");
        stale
    };
    let more = fails(&json, &[1, 16]);
    assert!(matches!(more, StaleWays::Unknown(_)), "{more}");
    let mut other = json.clone();
    other["cublas_lt"] = 1.into();
    let version = fails(&other, &ROWS);
    assert!(matches!(version, StaleWays::Library { then: 1, .. }), "{version}");
    // Ways that no GPU has.
    for never in [
        serde_json::json!({ "Lt": "270f" }),
        serde_json::json!({ "Hopper": 7 }),
        serde_json::json!({ "Stream": { "row_warps": 0, "cluster": 0, "blocks_per_sm": 0 } }),
        serde_json::json!({ "Many": { "rows": 1, "weights": 1, "parts": 1 } }),
        serde_json::json!({ "Int4": 1 }),
    ] {
        let mut other = json.clone();
        for layers in other["layers"].as_array_mut().unwrap() {
            layers["ways"][4]["choice"] = never.clone();
        }
        let refused = fails(&other, &ROWS);
        assert!(matches!(refused, StaleWays::Refused(_)), "{never}: {refused}");
    }
}

/// Layers with norms of what is added are measured with these, in one launch and one by one, and are another choice than those without.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn chains_are_measured_with_their_norms() {
    let Some(gpu) = common::hopper() else { return };
    let mut rng = common::rng("linear, chains with norms");
    let (mut linears, fused) = (linears(&gpu), FusedKernels::load(&gpu).expect("kernels"));
    let activation = Activation::GeluTanh;
    // A mixer's output, gate and up, down, and what follows.
    let sizes = [[512, 1024], [3072, 512], [512, 1536], [768, 512]];
    let layers = sizes.map(|[n, k]| Case::random(&mut rng, 1, n, k, false).layer(&gpu));
    let [output, gate_up, down, next] = layers.each_ref();
    let room = common::random(&mut rng, 1 << 14);
    let (x, out) = (common::upload(&gpu, &room), common::upload(&gpu, &room));
    let scratch = LinearScratch {
        x: x.slice().range(0..room.len()),
        out: out.slice(),
        weights: x.slice().range(0..0),
    };
    let plain = LinearOutput::Bf16;
    let kinds = [plain, LinearOutput::Glu(activation), plain, plain];
    let each = layers.each_ref().map(|layer| [layer]);
    let uses = each.iter().zip(kinds).map(|(layers, output)| LinearUse {
        layers,
        output,
        rows: &[1],
    });
    let uses: Vec<_> = uses.collect();
    linears.measure(&uses, scratch).expect("measurements");

    let (chain, of) = ([output, gate_up, down], [[output, gate_up, down, next]]);
    let of = ChainUse {
        layers: &of,
        activation,
    };
    let norms = Cell::new(0);
    let add_normed = |norm: GpuNorm<'_>, [hidden, delta, normed]: [GpuSlice<'_, bf16>; 3]| {
        norms.set(norms.get() + 1);
        fused.sandwich_norm(hidden, delta, norm.weight, None, norm, normed)
    };
    let found = [None, Some(&add_normed as &AddNormed<'_>)].map(|add_normed| {
        let measured = linears
            .measure_chain(of, add_normed, scratch)
            .expect("a measurement");
        let [together, apart] = measured.expect("layers of a chain");
        assert!(together > 0.0 && apart > 0.0, "{together} {apart}");
        let is_faster = together < apart;
        let has_norms = add_normed.is_some();
        assert_eq!(linears.chains(chain, has_norms), is_faster);
        // Nothing is known of layers with norms from those without.
        assert!(has_norms || !linears.chains(chain, true));
        is_faster
    });
    // Two in each of two calls.
    assert_eq!(norms.get(), 4);
    let known = |linears: &Linears| [false, true].map(|sum_norms| linears.chains(chain, sum_norms));
    assert_eq!(known(&linears), found);

    let ways = linears.ways();
    linears.forget();
    assert_eq!(known(&linears), [false; 2]);
    linears.take_over(&ways, &uses, scratch).expect("the same GPU");
    assert_eq!(known(&linears), found);
}
