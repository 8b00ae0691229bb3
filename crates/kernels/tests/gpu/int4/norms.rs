//! Norms ahead of products of weights in four bits, where they are a part of them.

use half::bf16;
use plimsoll_device::cuda::Gpu;
use plimsoll_kernels::cuda::{GpuLinear, LinearOutput, LinearPath, Linears};

use super::{Case, GROUPS, TOLERANCE, gated};
use crate::chain::{EPS, add, normalise, round};
use crate::common::{self, wide};
use crate::fused::ACTIVATIONS;
use crate::linear::{Normed, forward_norm, linears};

impl Case {
    /// Other inputs of the same row.
    fn delta(&self) -> Vec<bf16> {
        let rows = self.x.chunks_exact(self.k);
        let turned = rows.flat_map(|row| {
            let (first, rest) = row.split_at(self.k / 3);
            rest.iter().chain(first)
        });
        turned.copied().collect()
    }

    /// As bf16, all of them would be 0.39 % less.
    fn norm_weight(&self) -> Vec<f32> {
        let steps = [0.5, 1.0, 2.0];
        let weight = (0..self.k).map(|at| steps[at % steps.len()] * (1.0 + 0.99 / 256.0));
        weight.collect()
    }

    fn forward_norm(&self, gpu: &Gpu, linears: &Linears, layer: &GpuLinear, output: LinearOutput) -> Normed {
        let inputs = [&self.x[..], &self.delta()];
        forward_norm(gpu, linears, layer, output, inputs, &self.norm_weight())
    }

    /// The norm ahead of the product, with all kinds of outputs for which it is a part of it. Kernels make it in one of `ways`.
    pub(super) fn check_norm(
        &self,
        gpu: &Gpu,
        linears: &Linears,
        what: &str,
        ways: &[NormOf],
        tolerance: f64,
    ) {
        let layer = self.layer(gpu);
        if !linears.fuses_norm(self.m, &layer, LinearOutput::Bf16) {
            return;
        }
        assert!(self.order.is_none(), "{what}: inputs in order");
        let (sums, weight) = (add(&wide(&self.x), &wide(&self.delta())), self.norm_weight());
        let references: Vec<Vec<f64>> = ways
            .iter()
            .map(|norm_of| {
                let rows = sums.chunks_exact(self.k);
                self.reference(&rows.flat_map(|row| norm_of(row, &weight)).collect::<Vec<_>>())
            })
            .collect();
        let check = |what: &str, output, of: &dyn Fn(&[f64]) -> Vec<f64>, tolerance| {
            let found = self.forward_norm(gpu, linears, &layer, output);
            assert_eq!(wide(&found.sums), sums, "{what}: sums");
            let out = common::widen(&found.out);
            let error = |reference: &Vec<f64>| common::relative_error(&out, reference);
            let references = references.iter().map(|reference| of(reference));
            let closest = references.min_by(|a, b| error(a).total_cmp(&error(b))).unwrap();
            common::assert_close(what, &out, &closest, tolerance);
        };
        check(
            &format!("{what} norm"),
            LinearOutput::Bf16,
            &|sums| sums.to_vec(),
            tolerance,
        );
        for activation in ACTIVATIONS {
            let output = LinearOutput::Glu(activation);
            if linears.fuses_norm(self.m, &layer, output) {
                // Errors of the gate and of the other factor.
                let gated = |sums: &[f64]| gated(sums, self.n, activation);
                check(&format!("{what} norm {activation:?}"), output, &gated, 6e-3);
            }
        }
    }
}

/// Makes the norm of a row of sums, with its weights.
pub(super) type NormOf = fn(&[f64], &[f32]) -> Vec<f64>;

/// All ways in which kernels round it.
pub(super) const NORMS: [NormOf; 2] = [normalise, weighed_first];

/// The norm as kernels with inputs in registers make it: sums times weights are rounded, and multiplied by the row's factor after the product.
/// Rounded elsewhere, a row of 128 inputs differs by up to 0.7 %.
fn weighed_first(sums: &[f64], weight: &[f32]) -> Vec<f64> {
    let square = sums.iter().map(|x| x * x).sum::<f64>() / sums.len() as f64;
    let factor = 1.0 / (square + f64::from(EPS)).sqrt();
    let both = sums.iter().zip(weight);
    both.map(|(x, weight)| round(x * f64::from(*weight)) * factor)
        .collect()
}

/// Some tiles for each block, the last of them not whole; windows for few warps and as many as they hold; rows that depend on no other.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn norms_of_inputs_in_registers() {
    let Some(gpu) = common::hopper() else { return };
    let mut rng = common::rng("int4, norms");
    let mut linears = linears(&gpu);
    linears.fix(Some(LinearPath::Int4Rows));
    // With so many rows of weights for each block, one slab is best.
    let of_tile = 16 * gpu.info().sm_count;
    for group in GROUPS {
        for (m, tiles, fewer, k) in [
            (1, 3, 8, 128),
            (1, 2, 0, 4096),
            (2, 2, 16, 2176),
            (3, 1, 0, 4096),
            (5, 2, 0, 1024),
            (7, 1, 8, 3968),
            (8, 2, 16, 4096),
            (8, 3, 0, 640),
        ] {
            let n = tiles * of_tile - fewer;
            let mut case = Case::random(&mut rng, group, [m, n, k], fewer == 8, false);
            let (layer, output) = (case.layer(&gpu), LinearOutput::Bf16);
            let what = case.what("inputs in registers");
            assert!(linears.fuses_norm(m, &layer, output), "{what}");
            if !n.is_multiple_of(16) {
                case.check_norm(&gpu, &linears, &what, &[weighed_first], TOLERANCE);
                continue;
            }
            let gated = LinearOutput::Glu(ACTIVATIONS[0]);
            assert!(linears.fuses_norm(m, &layer, gated), "{what}, gated");
            case.check_norm(&gpu, &linears, &what, &[weighed_first], TOLERANCE);
            let first = case.forward_norm(&gpu, &linears, &layer, output);
            assert!(
                first == case.forward_norm(&gpu, &linears, &layer, output),
                "{what}: two runs"
            );
            case.x[k..].fill(bf16::NAN);
            let second = case.forward_norm(&gpu, &linears, &layer, output);
            let bits = |out: &[bf16]| out[..n].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&first.out), bits(&second.out), "{what}: NaN in other rows");
            let is_nan = second.out[n..].iter().all(|x| x.is_nan());
            assert!(is_nan, "{what}: NaN in other rows");
        }
        // More rows, inputs that are not whole windows, several slabs, fewer blocks than windows.
        for (m, n, k) in [
            (9, of_tile, 1024),
            (8, of_tile, 1000),
            (8, of_tile, 4224),
            (1, 16, 256),
        ] {
            let case = Case::random(&mut rng, group, [m, n, k], false, false);
            let fuses = linears.fuses_norm(m, &case.layer(&gpu), LinearOutput::Bf16);
            assert!(!fuses, "{}", case.what("inputs in registers"));
        }
    }
}
