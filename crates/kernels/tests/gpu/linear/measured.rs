//! Choices that are measured, and taken over from another measurement.

use half::bf16;
use plimsoll_kernels::Activation;
use plimsoll_kernels::cuda::{LinearOutput, LinearScratch, LinearUse, LinearWays, StaleWays};

use super::{Case, check, linears};
use crate::common;

/// Whatever is measured to be fastest, for the measured numbers of rows and those between.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn measured_choices() {
    let gpu = common::gpu();
    let mut rng = common::rng("linear, measured");
    let mut linears = linears(&gpu);
    let (n, k) = (1040, 512);
    let rows = [1, 8, 32, 64, 256];
    let (x, out) = (
        common::poisoned::<bf16>(&gpu, 256 * k),
        common::poisoned::<f32>(&gpu, 256 * n),
    );
    let case = Case::random(&mut rng, 1, n, k, false);
    let layer = case.layer(&gpu);
    let layers = [&layer];
    let outputs = [LinearOutput::Glu(Activation::Silu), LinearOutput::F32];
    let uses = outputs.map(|output| LinearUse {
        layers: &layers,
        output,
        rows: &rows,
    });
    let scratch = LinearScratch {
        x: x.slice(),
        out: out.slice(),
        weights: x.slice().range(0..0),
    };
    linears.measure(&uses, scratch).expect("measurements");
    // Unfused and fused gate and up, and logits.
    let choices = linears.choices();
    assert_eq!(choices.len(), 3 * rows.len(), "{choices:?}");
    for m in [1, 5, 8, 30, 33, 100, 256, 300] {
        let case = Case {
            m,
            x: common::random(&mut rng, m * k),
            ..case.clone()
        };
        check(&gpu, &linears, &case, "measured");
    }
}

/// Who takes over what another measured chooses as that one did, or takes over nothing.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn measured_choices_are_taken_over() {
    let gpu = common::gpu();
    let mut rng = common::rng("linear, taken over");
    let (n, k) = (1040, 512);
    let (x, out) = (
        common::poisoned::<bf16>(&gpu, 256 * k),
        common::poisoned::<f32>(&gpu, 256 * n),
    );
    let case = Case::random(&mut rng, 1, n, k, false);
    let layer = case.layer(&gpu);
    let layers = [&layer];
    let outputs = [LinearOutput::Glu(Activation::Silu), LinearOutput::F32];
    let uses_of = |rows: &'static [usize]| {
        outputs.map(|output| LinearUse {
            layers: &layers,
            output,
            rows,
        })
    };
    let scratch = LinearScratch {
        x: x.slice(),
        out: out.slice(),
        weights: x.slice().range(0..0),
    };
    let uses = uses_of(&[1, 8, 32, 64, 256]);
    let mut measured = linears(&gpu);
    measured.measure(&uses, scratch).expect("measurements");
    let json = serde_json::to_value(measured.ways()).unwrap();
    let ways = |json: &serde_json::Value| serde_json::from_value::<LinearWays>(json.clone()).unwrap();

    let mut linears = linears(&gpu);
    linears
        .take_over(&ways(&json), &uses, scratch)
        .expect("the same GPU");
    assert_eq!(linears.choices(), measured.choices());
    for m in [1, 5, 8, 30, 33, 100, 256, 300] {
        let case = Case {
            m,
            x: common::random(&mut rng, m * k),
            ..case.clone()
        };
        check(&gpu, &linears, &case, "taken over");
    }

    linears.forget();
    let mut fails = |json: &serde_json::Value, uses: &[LinearUse<'_>]| {
        let stale = linears.take_over(&ways(json), uses, scratch).unwrap_err();
        assert!(linears.choices().is_empty(), "{stale}");
        stale
    };
    let more = fails(&json, &uses_of(&[1, 16]));
    assert!(matches!(more, StaleWays::Unknown(_)), "{more}");
    let mut other = json.clone();
    other["cublas_lt"] = 1.into();
    let version = fails(&other, &uses);
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
        let refused = fails(&other, &uses);
        assert!(matches!(refused, StaleWays::Refused(_)), "{never}: {refused}");
    }
}
