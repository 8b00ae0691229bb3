//! The expert that all rows go to among those that some go to.

use half::bf16;
use plimsoll_device::cuda::Gpu;
use plimsoll_kernels::cuda::{EXPERT_TILES, GpuExpertOutputs, GpuExperts, GpuRouter, GpuRoutes, MoeKernels};
use plimsoll_kernels::{Activation, ExpertActivation, RouterSoftmax};
use rand::Rng;
use rand::rngs::StdRng;

use super::routes::{Room, random_logits};
use super::weights::{Experts, Format};
use super::{ROUNDED_TOLERANCE, activate};
use crate::common;

const ACTIVATION: ExpertActivation = ExpertActivation::Glu(Activation::Silu);

/// Experts, of which the last one is that of all rows.
struct Layer {
    experts: Experts,
    /// Without the last one, and with it as that of all rows.
    apart: GpuExperts,
    together: GpuExperts,
}

impl Layer {
    fn random(gpu: &Gpu, rng: &mut StdRng, format: Format, count: usize, shape: [usize; 2]) -> Self {
        let experts = Experts::random(gpu, rng, format, count + 1, shape, false);
        let (shared, routed) = experts.linears.split_last().unwrap();
        let apart = GpuExperts::new(gpu, routed).unwrap();
        Self {
            together: apart.clone().with_shared(shared),
            apart,
            experts,
        }
    }

    fn shared_product(&self, x: &[f64]) -> Vec<f64> {
        self.experts.product(self.experts.wide.len() - 1, x)
    }
}

/// What the expert of all rows gives is its product in `f64`, what others give is, to the bit, the same as without it, and sums take up both.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn all_rows_go_to_an_expert_among_others() {
    let gpu = common::gpu();
    let mut rng = common::rng("all_rows_go_to_an_expert_among_others");
    let kernels = MoeKernels::load(&gpu).unwrap();
    for format in [Format::Bf16, Format::Fp8, Format::Fp8Blocks] {
        for rows in [2, 8, 15, 16, 17, 40] {
            let (hidden, inner) = match format {
                Format::Fp8Blocks => (128 * rng.random_range(1..=9), 128 * rng.random_range(1..=9)),
                _ => (16 * rng.random_range(1..=70), 16 * rng.random_range(1..=70)),
            };
            let count = rng.random_range(1..40);
            let top_k = rng.random_range(1..=count.min(8));
            let gate_up = Layer::random(&gpu, &mut rng, format, count, [2 * inner, hidden]);
            let down = Layer::random(&gpu, &mut rng, format, count, [hidden, inner]);
            let what = format!("{format:?}: {rows} rows, {top_k} of {count} of [{inner}, {hidden}]");

            let room = Room::new(&gpu, rows, top_k, count, EXPERT_TILES[0]);
            let logits = random_logits(&mut rng, rows, count);
            let logits = common::upload(&gpu, &logits);
            let router = GpuRouter::plain(None, RouterSoftmax::Chosen);
            kernels
                .route(logits.slice().range(0..rows * count), router, &room.routes())
                .unwrap();
            let x = common::random(&mut rng, rows * hidden);
            let gates: Vec<f32> = (0..rows).map(|_| rng.random_range(-4.0..4.0)).collect();
            let (x_there, gates_there) = (common::upload(&gpu, &x), common::upload(&gpu, &gates));
            // With the expert of all rows in the same launches, and with its outputs given; all that is computed, then the sums.
            let run = |layers: [&GpuExperts; 2], routes: GpuRoutes<'_>, of_shared: &[bf16]| {
                let places = rows * (top_k + usize::from(routes.shared));
                let activated = common::poisoned::<bf16>(&gpu, places * inner);
                let projected = common::poisoned::<bf16>(&gpu, places * hidden);
                let activated = activated.slice().range(0..places * inner);
                let sums = common::upload(&gpu, of_shared);
                let sums = sums.slice().range(0..rows * hidden);
                let outputs = GpuExpertOutputs {
                    x: projected.slice().range(0..places * hidden),
                    routes,
                    gates: Some(gates_there.slice().range(0..rows)),
                };
                let x = x_there.slice().range(0..rows * hidden);
                kernels
                    .gate_up(x, layers[0], ACTIVATION, &routes, activated)
                    .unwrap();
                kernels.down(activated, layers[1], &routes, outputs.x).unwrap();
                kernels.combine(&outputs, sums).unwrap();
                [activated, outputs.x, sums].map(|slice| gpu.download::<bf16>(slice).unwrap())
            };
            let routes = GpuRoutes {
                shared: true,
                ..room.routes()
            };
            assert!(
                kernels.shares(&gate_up.together, &down.together, &routes),
                "{what}"
            );
            assert!(!kernels.shares(&gate_up.apart, &down.apart, &routes), "{what}");
            let nothing = vec![bf16::NAN; rows * hidden];
            let [activated, projected, sums] = run([&gate_up.together, &down.together], routes, &nothing);

            let (of_routes, of_all) = activated.split_at(rows * top_k * inner);
            let expected: Vec<f64> = common::wide(&x)
                .chunks(hidden)
                .flat_map(|x| {
                    let both = gate_up.shared_product(x);
                    let (gate, up) = both.split_at(inner);
                    let all = gate.iter().zip(up).map(|(g, u)| activate(ACTIVATION, *g, *u));
                    all.collect::<Vec<_>>()
                })
                .collect();
            let compare = |name: &str, found: &[bf16], expected: &[f64]| {
                let what = format!("{what}: {name}");
                common::assert_close(&what, &common::widen(found), expected, ROUNDED_TOLERANCE);
            };
            compare("gate and up", of_all, &expected);
            let (routed, shared) = projected.split_at(rows * top_k * hidden);
            let expected: Vec<f64> = common::wide(of_all)
                .chunks(inner)
                .flat_map(|x| down.shared_product(x))
                .collect();
            compare("down", shared, &expected);

            let apart = run([&gate_up.apart, &down.apart], room.routes(), shared);
            let bits = |values: &[bf16]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            for (name, found, apart) in [
                ("gate and up", of_routes, &apart[0]),
                ("down", routed, &apart[1]),
                ("sums", &sums[..], &apart[2]),
            ] {
                assert!(bits(found) == bits(apart), "{what}: {name} of others");
            }
        }
    }
}
