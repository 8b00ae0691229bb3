use half::bf16;
use plimsoll_core::Scratch;
use plimsoll_device::DryArena;
use rand::Rng;
use rand::rngs::StdRng;

use super::*;
use crate::testing::{arena, assert_close, assert_same_bits, budget, normal, rng, seeds};
use crate::{Activation, LinearShape, Matrix, WeightType};

/// Where rows go: by logits that are random, or the same for all rows, or of which each row has its own.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Routing {
    Random,
    /// All rows to the same experts: the others are empty, these are full.
    Same,
    /// As evenly as it goes.
    Spread,
}

const ROUTINGS: [Routing; 3] = [Routing::Random, Routing::Same, Routing::Spread];

impl Routing {
    fn logits(self, rng: &mut StdRng, rows: usize, experts: usize) -> Vec<f32> {
        let mut logits = normal(rng, rows * experts);
        let first = rng.random_range(0..experts);
        for (row, logits) in logits.chunks_exact_mut(experts).enumerate() {
            for (expert, logit) in logits.iter_mut().enumerate() {
                let rank = match self {
                    Self::Random => 0,
                    Self::Same => (expert + first) % experts,
                    Self::Spread => (expert + row) % experts,
                };
                *logit += 20.0 * rank as f32;
            }
        }
        logits
    }
}

struct Case {
    rows: usize,
    width: usize,
    inner: usize,
    experts: usize,
    top_k: usize,
    softmax: RouterSoftmax,
    activation: ExpertActivation,
    dtype: WeightType,
    /// Of each expert: gate and up, down.
    weights: Vec<[Vec<f32>; 2]>,
    gate_up: Vec<Arc<Linear>>,
    down: Vec<Arc<Linear>>,
}

impl Case {
    fn random(rng: &mut StdRng) -> Self {
        let experts = rng.random_range(1..20);
        let dtype = [WeightType::F32, WeightType::Bf16, WeightType::Q8_0][rng.random_range(0..3)];
        // Whole blocks.
        let size = |rng: &mut StdRng| 32 * rng.random_range(1..4) as usize;
        let (width, inner) = match dtype {
            WeightType::Q8_0 => (size(rng), size(rng)),
            _ => (rng.random_range(1..70), rng.random_range(1..70)),
        };
        let mut case = Self {
            rows: rng.random_range(1..40),
            width,
            inner,
            experts,
            top_k: rng.random_range(1..=experts.min(9)),
            softmax: [RouterSoftmax::All, RouterSoftmax::Chosen][rng.random_range(0..2)],
            activation: [
                ExpertActivation::Glu(Activation::Silu),
                ExpertActivation::ClampedSwiglu,
            ][rng.random_range(0..2)],
            dtype,
            weights: Vec::new(),
            gate_up: Vec::new(),
            down: Vec::new(),
        };
        for _ in 0..experts {
            let (gate_up, a) = case.matrix(rng, 2 * inner, width);
            let (down, b) = case.matrix(rng, width, inner);
            case.weights.push([a, b]);
            case.gate_up.push(Arc::new(gate_up));
            case.down.push(Arc::new(down));
        }
        case
    }

    /// A matrix and its elements.
    fn matrix(&self, rng: &mut StdRng, rows: usize, cols: usize) -> (Linear, Vec<f32>) {
        let values = normal(rng, rows * cols);
        let data: Vec<u8> = match self.dtype {
            WeightType::Bf16 => values
                .iter()
                .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
                .collect(),
            WeightType::Q8_0 => values
                .chunks_exact(32)
                .flat_map(|x| {
                    let codes = x.iter().map(|x| (x * 20.0) as i8 as u8);
                    half::f16::from_f32(0.05).to_le_bytes().into_iter().chain(codes)
                })
                .collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        let matrix = Matrix::new(self.dtype, rows, cols, &data).unwrap();
        let linear = Linear::new(&[matrix], None, &budget()).unwrap();
        let mut widened = vec![0.0; values.len()];
        for (row, out) in widened.chunks_exact_mut(cols).enumerate() {
            linear.weight_row(row, out);
        }
        (linear, widened)
    }

    fn run(&self, x: &[f32], logits: &[f32], arena: &Arena) -> (Vec<Route>, Vec<f32>) {
        let rows = x.len() / self.width;
        let mut routes = vec![
            Route {
                expert: 0,
                row: 0,
                weight: 0.0
            };
            rows * self.top_k
        ];
        route(
            &mut logits.to_vec(),
            self.experts,
            Router::plain(self.softmax),
            &mut routes,
        );
        let mut out = vec![f32::NAN; x.len()];
        let buffers = ExpertBuffers {
            gathered: &mut vec![f32::NAN; x.len()],
            gate_up: &mut vec![f32::NAN; rows * 2 * self.inner],
            activated: &mut vec![f32::NAN; rows * self.inner],
            out: &mut vec![f32::NAN; x.len()],
        };
        let weights = ExpertWeights {
            gate_up: &self.gate_up,
            down: &self.down,
        };
        experts(x, &routes, weights, self.activation, buffers, &mut out, arena).unwrap();
        (routes, out)
    }

    /// Row after row, expert after expert, in `f64`: the definition.
    fn naive(&self, x: &[f32], logits: &[f32]) -> Vec<f64> {
        let rows = x.chunks_exact(self.width).zip(logits.chunks_exact(self.experts));
        rows.flat_map(|(x, logits)| self.naive_row(x, logits)).collect()
    }

    fn naive_row(&self, x: &[f32], logits: &[f32]) -> Vec<f64> {
        let mut order: Vec<usize> = (0..self.experts).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let chosen = &order[..self.top_k];
        let sum_over = match self.softmax {
            RouterSoftmax::All => &order[..],
            RouterSoftmax::Chosen => chosen,
        };
        let sum: f64 = sum_over
            .iter()
            .map(|&e| f64::from(logits[e] - logits[order[0]]).exp())
            .sum();
        let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let product = |x: &[f64], w: &[f32]| -> Vec<f64> {
            w.chunks_exact(x.len())
                .map(|w| w.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum())
                .collect()
        };
        let mut out = vec![0.0; self.width];
        for &expert in chosen {
            let weight = f64::from(logits[expert] - logits[order[0]]).exp() / sum;
            let [gate_up, down] = &self.weights[expert];
            let gate_up = product(&x, gate_up);
            let (gate, up) = gate_up.split_at(self.inner);
            let inner = gate.iter().zip(up).map(|(&gate, &up)| self.activate(gate, up));
            let y = product(&inner.collect::<Vec<_>>(), down);
            out.iter_mut().zip(y).for_each(|(out, y)| *out += weight * y);
        }
        out
    }

    fn activate(&self, gate: f64, up: f64) -> f64 {
        match self.activation {
            ExpertActivation::ClampedSwiglu => {
                let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
                gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)
            }
            ExpertActivation::Glu(_) => gate / (1.0 + (-gate).exp()) * up,
        }
    }
}

#[test]
fn matches_the_definition_wherever_rows_go() {
    for seed in seeds(60) {
        let mut rng = rng(seed);
        let case = Case::random(&mut rng);
        for routing in ROUTINGS {
            let x = normal(&mut rng, case.rows * case.width);
            let logits = routing.logits(&mut rng, case.rows, case.experts);
            let (routes, out) = case.run(&x, &logits, &arena());
            // Inputs of quantised products have 15 bits.
            let tolerance = if case.dtype == WeightType::Q8_0 {
                2e-4
            } else {
                5e-6
            };
            let context = format!("seed {seed}, {routing:?}, {:?}", case.dtype);
            assert_close(&out, &case.naive(&x, &logits), tolerance, &context);
            let hit = routes.chunk_by(|a, b| a.expert == b.expert).count();
            match routing {
                Routing::Same => assert_eq!(hit, case.top_k, "{context}: all others are empty"),
                Routing::Spread => assert_eq!(hit, case.experts.min(case.rows + case.top_k - 1), "{context}"),
                Routing::Random => {}
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_those_beside_it() {
    for seed in seeds(30) {
        let mut rng = rng(seed);
        let case = Case::random(&mut rng);
        let x = normal(&mut rng, case.rows * case.width);
        let logits = Routing::Random.logits(&mut rng, case.rows, case.experts);
        let (_, together) = case.run(&x, &logits, &arena());
        for row in 0..case.rows {
            let x = &x[row * case.width..][..case.width];
            let (_, alone) = case.run(x, &logits[row * case.experts..][..case.experts], &arena());
            assert_same_bits(
                &alone,
                &together[row * case.width..][..case.width],
                &format!("seed {seed}"),
            );
        }
    }
}

/// What a step takes is that of the shapes, wherever rows go.
#[test]
fn memory_does_not_depend_on_the_routing() {
    for seed in seeds(30) {
        let mut rng = rng(seed);
        let case = Case::random(&mut rng);
        let shape = |inputs, outputs| LinearShape {
            inputs,
            parts: vec![(case.dtype, outputs)],
        };
        let mut counted = DryArena::default();
        for shape in [shape(case.width, 2 * case.inner), shape(case.inner, case.width)] {
            shape.scratch(case.rows, &mut counted).unwrap();
        }
        let counted = counted.take_high_water();
        for routing in ROUTINGS {
            let x = normal(&mut rng, case.rows * case.width);
            let logits = routing.logits(&mut rng, case.rows, case.experts);
            let mut arena = Arena::new(&budget(), Scratch::Growable).unwrap();
            case.run(&x, &logits, &arena);
            assert_eq!(
                arena.take_high_water(),
                counted,
                "seed {seed}, {routing:?}, {:?}",
                case.dtype
            );
        }
    }
}

#[test]
fn every_instruction_set_routes_alike() {
    for seed in seeds(20) {
        let mut rng = rng(seed);
        let (rows, experts) = (rng.random_range(1..20), rng.random_range(1..300));
        let top_k = rng.random_range(1..=experts.min(40));
        let logits = normal(&mut rng, rows * experts);
        for softmax in [RouterSoftmax::All, RouterSoftmax::Chosen] {
            let routes = |level| {
                let mut routes = vec![Route::zeroed(); rows * top_k];
                route_at(
                    level,
                    &mut logits.clone(),
                    experts,
                    Router::plain(softmax),
                    &mut routes,
                );
                routes
            };
            let expected = routes(Level::detect());
            for level in Level::available() {
                assert_eq!(routes(level), expected, "seed {seed} {level:?}");
            }
        }
    }
}

#[test]
fn equal_logits_go_to_the_first_experts() {
    let mut routes = [Route::zeroed(); 2];
    route(
        &mut [1.0, 3.0, 3.0, 3.0],
        4,
        Router::plain(RouterSoftmax::Chosen),
        &mut routes,
    );
    let chosen = routes.map(|route| (route.expert, route.weight));
    assert_eq!(chosen, [(1, 0.5), (2, 0.5)]);
}

#[test]
fn what_is_no_number_stays_so() {
    for wrong in [f32::NAN, -f32::NAN, f32::INFINITY] {
        for softmax in [RouterSoftmax::All, RouterSoftmax::Chosen] {
            let mut routes = [Route::zeroed(); 2];
            route(&mut [0.5, wrong, 0.25], 3, Router::plain(softmax), &mut routes);
            assert!(
                routes.iter().all(|route| route.weight.is_nan()),
                "{wrong}: {routes:?}"
            );
        }
    }
}

#[test]
fn a_gated_output_is_added() {
    for seed in seeds(10) {
        let mut rng = rng(seed);
        let (rows, width) = (rng.random_range(1..30), rng.random_range(1..90));
        let (x, gates) = (normal(&mut rng, rows * width), normal(&mut rng, rows));
        let before = normal(&mut rng, rows * width);
        let mut out = before.clone();
        add_gated(&x, &mut gates.clone(), &mut out);
        let gate = |i: usize| 1.0 / (1.0 + (-f64::from(gates[i / width])).exp());
        let want: Vec<f64> = (0..rows * width)
            .map(|i| f64::from(before[i]) + gate(i) * f64::from(x[i]))
            .collect();
        assert_close(&out, &want, 1e-6, &format!("seed {seed}"));
    }
}
