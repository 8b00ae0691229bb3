//! Choices that are measured, and taken over from another measurement.

use half::bf16;
use plimsoll_device::cuda::{Gpu, GpuSlab};
use plimsoll_kernels::Activation;
use plimsoll_kernels::cuda::{
    GpuLinear, LinearOutput, LinearScratch, LinearUse, LinearWays, Linears, StaleWays,
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
