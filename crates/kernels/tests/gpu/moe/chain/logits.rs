//! Where a layer in one launch sends a row whose logits are equal, infinite or no numbers.

use half::bf16;
use plimsoll_device::cuda::Gpu;
use plimsoll_kernels::cuda::MoeKernels;
use plimsoll_kernels::{Route, Router, RouterSoftmax, route};
use rand::Rng;
use rand::rngs::StdRng;

use super::{ACTIVATIONS, BF16, Case, Format, Outputs, Size, Table};
use crate::common;

const SMALL: Size = Size {
    attended: 256,
    width: 512,
    inner: 256,
    next: 64,
    experts: 40,
    top_k: 8,
    ..BF16
};

impl Case {
    /// Where the row goes by these logits, which are without scales and biases, in the order in which the kernel stores what experts make of it:
    /// the largest first; of equal ones they stay in the order of experts.
    pub(super) fn routes(&self, logits: &[f32]) -> Vec<Route> {
        let bias = self.router_bias.iter().flatten().map(|bias| bias.to_f32());
        let mut logits: Vec<f32> = logits.iter().map(|logit| logit * self.router_scale).collect();
        for (logit, bias) in logits.iter_mut().zip(bias) {
            *logit += bias;
        }
        // What is no number is the largest, and there is one zero.
        let key = |logit: &f32| {
            if logit.is_nan() {
                f32::INFINITY
            } else {
                logit + 0.0
            }
        };
        let keys: Vec<f32> = logits.iter().map(key).collect();
        let none = Route {
            row: 0,
            expert: 0,
            weight: 0.0,
        };
        let mut routes = vec![none; self.size.top_k];
        let router = Router {
            expert_scale: self.expert_scale.as_deref(),
            ..Router::plain(self.softmax)
        };
        route(&mut logits, self.size.experts, router, &mut routes);
        routes.sort_by(|a, b| keys[b.expert as usize].total_cmp(&keys[a.expert as usize]));
        routes
    }

    /// A layer whose router gives 0 for every expert, before biases.
    fn indifferent(gpu: &Gpu, rng: &mut StdRng, size: Size, softmax: RouterSoftmax) -> Self {
        let weights = vec![bf16::ZERO; size.experts * size.width];
        Self {
            router: Table::new(gpu, &weights, size.width),
            router_bias: None,
            softmax,
            ..Self::random(gpu, rng, size)
        }
    }

    fn chosen(&self, found: &Outputs) -> Vec<u32> {
        let routes = self.routes(&found.logits);
        routes.iter().map(|route| route.expert).collect()
    }

    /// The row reached its experts, whose weights are no numbers: nor is then what they add.
    fn check_lost(&self, found: &Outputs) {
        let routes = self.routes(&found.logits);
        assert!(routes.iter().all(|route| route.weight.is_nan()), "{routes:?}");
        self.check_experts(found, &self.inputs(), &routes);
        assert!(found.hidden.iter().all(|x| x.is_nan()), "{:?}", self.size);
        assert!(found.out.iter().all(|x| x.is_nan()), "{:?}", self.size);
    }
}

/// Sizes in all formats that have a chain, with and without an expert for all rows, and with an MLP.
fn sizes() -> Vec<Size> {
    let formats = [Format::Bf16, Format::Fp8, Format::Fp8Blocks];
    let all = formats
        .iter()
        .flat_map(|&format| [(format, false), (format, true)]);
    let all = all.map(|(format, shared)| Size {
        shared,
        format,
        dense: format,
        ..SMALL
    });
    let mxfp4 = Size {
        format: Format::Mxfp4,
        ..SMALL
    };
    let beside = Size { mlp: 136, ..SMALL };
    all.chain([mxfp4, beside]).collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn of_equal_logits_the_first_experts_are_taken() {
    let Some(gpu) = common::hopper() else { return };
    let (linears, kernels) = (crate::linear::linears(&gpu), MoeKernels::load(&gpu).unwrap());
    let mut rng = common::rng("of_equal_logits_the_first_experts_are_taken");
    // The shared expert's gate would be the only logit that is not 0, and may be next to nothing beside its error.
    for size in sizes().into_iter().filter(|size| !size.shared) {
        for softmax in [RouterSoftmax::All, RouterSoftmax::Chosen] {
            let mut case = Case::indifferent(&gpu, &mut rng, size, softmax);
            let found = case.run(&gpu, &kernels, &linears);
            case.check(&found);
            assert_eq!(case.chosen(&found), [0, 1, 2, 3, 4, 5, 6, 7], "{size:?}");

            // Many of each of few values, of which zero has two signs.
            let few = [-1.0, -0.0, 0.0, 0.5].map(bf16::from_f32);
            case.router_bias = Some((0..size.experts).map(|_| few[rng.random_range(0..4)]).collect());
            let found = case.run(&gpu, &kernels, &linears);
            case.check(&found);

            // Fewer than are taken have any weight: the first of the others are taken with none.
            let mut bias = vec![bf16::NEG_INFINITY; size.experts];
            for expert in [37, 5, 20] {
                bias[expert] = bf16::ONE;
            }
            case.router_bias = Some(bias);
            let found = case.run(&gpu, &kernels, &linears);
            case.check(&found);
            assert_eq!(case.chosen(&found), [5, 20, 37, 0, 1, 2, 3, 4], "{size:?}");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn what_is_no_number_or_infinite_is_taken_first_and_stays_so() {
    let Some(gpu) = common::hopper() else { return };
    let (linears, kernels) = (crate::linear::linears(&gpu), MoeKernels::load(&gpu).unwrap());
    let mut rng = common::rng("what_is_no_number_or_infinite_is_taken_first_and_stays_so");
    for size in sizes() {
        let mut case = Case::random(&gpu, &mut rng, size);
        case.router_bias = Some(common::random(&mut rng, size.experts));
        let before = case.run(&gpu, &kernels, &linears);
        case.check(&before);
        let finite = case.router_bias.clone();
        for odd in [
            &[(33, bf16::NAN)][..],
            &[(38, bf16::INFINITY)],
            &[(39, bf16::NAN), (11, bf16::INFINITY)],
        ] {
            case.router_bias.clone_from(&finite);
            for &(expert, value) in odd {
                case.router_bias.as_mut().unwrap()[expert] = value;
            }
            let found = case.run(&gpu, &kernels, &linears);
            assert_eq!(found.logits, before.logits, "{size:?}: logits are without biases");
            let mut first: Vec<u32> = odd.iter().map(|(expert, _)| *expert as u32).collect();
            first.sort_unstable();
            assert_eq!(case.chosen(&found)[..first.len()], first, "{size:?}");
            case.check_lost(&found);
        }
        // All of them: as if they were equal.
        case.router_bias = Some(vec![bf16::NAN; size.experts]);
        let found = case.run(&gpu, &kernels, &linears);
        assert_eq!(case.chosen(&found), [0, 1, 2, 3, 4, 5, 6, 7], "{size:?}");
        case.check_lost(&found);
        // Launches behind it take nothing from it.
        case.router_bias = finite;
        assert!(
            case.run(&gpu, &kernels, &linears) == before,
            "{size:?}: other bits"
        );
    }
}

/// The same where the router's product is infinite.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn infinite_products_of_the_router_are_infinite_logits() {
    let Some(gpu) = common::hopper() else { return };
    let (linears, kernels) = (crate::linear::linears(&gpu), MoeKernels::load(&gpu).unwrap());
    let mut rng = common::rng("infinite_products_of_the_router_are_infinite_logits");
    for size in sizes() {
        let mut case = Case::random(&gpu, &mut rng, size);
        case.router_bias = None;
        let weights: Vec<bf16> = common::random(&mut rng, size.experts * size.width);
        let inputs = case.inputs();
        let normed = &inputs.router;
        let is_far = |x: &f64| x.abs() > 0.1;
        let column = normed
            .iter()
            .position(is_far)
            .expect("not all are next to nothing");
        for (expert, logit) in [(21, f32::NEG_INFINITY), (30, f32::INFINITY)] {
            let mut weights = weights.clone();
            let row = &mut weights[expert * size.width..(expert + 1) * size.width];
            row.fill(bf16::ZERO);
            row[column] = bf16::from_f64(f64::from(logit) * normed[column].signum());
            case.router = Table::new(&gpu, &weights, size.width);
            let found = case.run(&gpu, &kernels, &linears);
            assert_eq!(found.logits[expert], logit, "{size:?}");
            let numbers: Vec<f32> = found.logits.iter().copied().filter(|x| x.is_finite()).collect();
            let mut want = case.router.product(normed);
            want.remove(expert);
            case.close("finite logits", &numbers, &want);
            match logit > 0.0 {
                true => {
                    assert_eq!(case.chosen(&found)[0], expert as u32, "{size:?}");
                    case.check_lost(&found);
                }
                false => {
                    assert!(!case.chosen(&found).contains(&(expert as u32)), "{size:?}");
                    let routes = case.routes(&found.logits);
                    assert!(routes.iter().all(|route| route.weight.is_finite()), "{routes:?}");
                    case.check_experts(&found, &inputs, &routes);
                    assert!(found.hidden.iter().all(|x| x.is_finite()), "{size:?}");
                }
            }
        }
    }
}

/// A row of what is no number passes through the whole launch, and the next one waits for nothing that it left.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_row_of_no_numbers_stays_one() {
    let Some(gpu) = common::hopper() else { return };
    let (linears, kernels) = (crate::linear::linears(&gpu), MoeKernels::load(&gpu).unwrap());
    let mut rng = common::rng("a_row_of_no_numbers_stays_one");
    for size in sizes() {
        let mut case = Case::random(&gpu, &mut rng, size);
        // A clamp would make numbers of it.
        case.activation = ACTIVATIONS[0];
        let before = case.run(&gpu, &kernels, &linears);
        let hidden = case.hidden.clone();
        case.hidden[7] = bf16::NAN;
        let found = case.run(&gpu, &kernels, &linears);
        let floats = [&found.logits, &found.gate_logit];
        assert!(floats.into_iter().flatten().all(|x| x.is_nan()), "{size:?}");
        let rest = [
            &found.activated,
            &found.dense_activated,
            &found.hidden,
            &found.out,
        ];
        assert!(rest.into_iter().flatten().all(|x| x.is_nan()), "{size:?}");
        case.hidden = hidden;
        assert!(
            case.run(&gpu, &kernels, &linears) == before,
            "{size:?}: other bits"
        );
    }
}
