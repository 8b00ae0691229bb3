//! Mixtures of experts: products and sums against definitions in `f64`, and what a row may depend on.

mod chain;
mod routes;
mod shared;
mod stream;
mod weights;

use half::bf16;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlice};
use plimsoll_kernels::cuda::{
    EXPERT_TILES, Fp8Scaling, FusedKernels, GpuExpertOutputs, GpuFp8Rows, GpuNorm, GpuRouter, GpuRows,
    MoeKernels,
};
use plimsoll_kernels::{Activation, ExpertActivation, Route, Router, RouterSoftmax, route};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use crate::common;
use crate::fp8::Quantised;
use routes::{Room, random_logits};
use weights::{Experts, Format};

const ACTIVATIONS: [ExpertActivation; 3] = [
    ExpertActivation::Glu(Activation::Silu),
    ExpertActivation::Glu(Activation::GeluTanh),
    ExpertActivation::ClampedSwiglu,
];

/// Sums are within this of the reference, rounded to bf16 once.
const TOLERANCE: f64 = 4e-3;
/// The same where weights may be rounded too.
const ROUNDED_TOLERANCE: f64 = 6e-3;

/// A layer with experts and rows for it.
struct Case {
    rows: usize,
    top_k: usize,
    hidden: usize,
    inner: usize,
    activation: ExpertActivation,
    x: Vec<bf16>,
    logits: Vec<f32>,
    gates: Option<Vec<f32>>,
    gate_up: Experts,
    down: Experts,
}

impl Case {
    fn random(
        gpu: &Gpu,
        rng: &mut StdRng,
        format: Format,
        rows: usize,
        experts: usize,
        top_k: usize,
    ) -> Self {
        let sizes = format.random_sizes(rng);
        Self::of_sizes(gpu, rng, format, sizes, [rows, experts, top_k])
    }

    fn of_sizes(
        gpu: &Gpu,
        rng: &mut StdRng,
        format: Format,
        (hidden, inner): (usize, usize),
        [rows, experts, top_k]: [usize; 3],
    ) -> Self {
        let bias = rng.random_bool(0.5);
        let logits = random_logits(rng, rows, experts);
        // Where rows go is another test's.
        let logits = logits
            .iter()
            .map(|x| if x.is_finite() { *x } else { 0.0 })
            .collect();
        Self {
            rows,
            top_k,
            hidden,
            inner,
            activation: *ACTIVATIONS.choose(rng).unwrap(),
            x: common::random(rng, rows * hidden),
            logits,
            gates: rng
                .random_bool(0.5)
                .then(|| (0..rows).map(|_| rng.random_range(-4.0..4.0)).collect()),
            gate_up: Experts::random(gpu, rng, format, experts, [2 * inner, hidden], bias),
            down: Experts::random(gpu, rng, format, experts, [hidden, inner], bias),
        }
    }

    fn what(&self) -> String {
        let Self {
            rows,
            top_k,
            hidden,
            inner,
            activation,
            gates,
            gate_up,
            ..
        } = self;
        let (format, experts, bias) = (gate_up.format, gate_up.wide.len(), gate_up.biases.is_some());
        format!(
            "{format:?}, {rows} rows, {top_k} of {experts} of [{inner}, {hidden}], {activation:?}, bias {bias}, shared {}",
            gates.is_some()
        )
    }

    /// Rows after the experts, from what is in `shared` before; and what was within.
    fn run(&self, gpu: &Gpu, kernels: &MoeKernels, tile: usize, shared: &[bf16]) -> Outputs {
        let Self {
            rows,
            top_k,
            hidden,
            inner,
            ..
        } = *self;
        let room = Room::new(gpu, rows, top_k, self.gate_up.wide.len(), tile);
        let routes = room.routes();
        let (x, logits) = (common::upload(gpu, &self.x), common::upload(gpu, &self.logits));
        let gates = common::upload(gpu, self.gates.as_deref().unwrap_or_default());
        let places = rows * top_k;
        let activated = common::poisoned::<bf16>(gpu, places * inner);
        let projected = common::poisoned::<bf16>(gpu, places * hidden);
        let out = common::upload(gpu, shared);
        let logits = logits.slice().range(0..self.logits.len());
        let router = GpuRouter::plain(None, RouterSoftmax::Chosen);
        let inner_rows = activated.slice().range(0..places * inner);
        let x = x.slice().range(0..rows * hidden);
        let fused = FusedKernels::load(gpu).unwrap();
        let gate_up = &self.gate_up.device;
        let scaling = kernels.input_scaling(gate_up, &routes);
        let taken = as_taken(gpu, &fused, scaling, (x, rows, hidden), |x| {
            kernels.route_gate_up(x, (logits, router), gate_up, self.activation, &routes, inner_rows)
        });
        if let Some(scaling) = kernels.output_scaling(gate_up, &routes) {
            let apart = Quantised::by(gpu, scaling, places, inner, |out| {
                fused.quantise(inner_rows, inner, out)
            });
            let together = Quantised::by(gpu, scaling, places, inner, |out| {
                let run = |x: GpuRows<'_>| kernels.gate_up(x, gate_up, self.activation, &routes, out);
                as_taken(gpu, &fused, Some(scaling), (x, rows, hidden), run);
                Ok(())
            });
            assert!(
                apart.bits() == together.bits(),
                "{}: quantised outputs",
                self.what()
            );
        }
        let outputs = GpuExpertOutputs {
            x: projected.slice().range(0..places * hidden),
            routes,
            gates: self.gates.as_ref().map(|_| gates.slice().range(0..rows)),
        };
        let down = &self.down.device;
        assert_eq!(kernels.input_scaling(down, &routes), scaling);
        let inner_taken = as_taken(gpu, &fused, scaling, (inner_rows, places, inner), |x| {
            kernels.down(x, down, &routes, outputs.x)
        });
        let sums = out.slice().range(0..rows * hidden);
        kernels.combine(&outputs, sums).unwrap();
        let shared = common::upload(gpu, shared);
        self.check_norm(
            gpu,
            kernels,
            &outputs,
            [shared.slice().range(0..rows * hidden), sums],
        );
        Outputs {
            sources: gpu.download(routes.sources).unwrap(),
            weights: gpu.download(routes.weights).unwrap(),
            streams: [gate_up, down].map(|experts| kernels.streams(experts, &routes)),
            scaling,
            taken,
            inner_taken,
            activated: gpu.download(inner_rows).unwrap(),
            projected: gpu.download(outputs.x).unwrap(),
            sums: gpu.download(sums).unwrap(),
        }
    }

    /// The norm that sums experts is, to the bit, the one of their sums; of eight bits too.
    fn check_norm(
        &self,
        gpu: &Gpu,
        kernels: &MoeKernels,
        outputs: &GpuExpertOutputs<'_>,
        [shared, sums]: [GpuSlice<'_, bf16>; 2],
    ) {
        if self.rows == 0 {
            return;
        }
        let scaling = match self.hidden.is_multiple_of(128) {
            true => Fp8Scaling::Blocks,
            false => Fp8Scaling::Rows,
        };
        let count = scaling.input_scales(self.rows, self.hidden);
        let fused = FusedKernels::load(gpu).unwrap();
        let (rows, n) = (self.rows, self.hidden);
        let mut rng = StdRng::seed_from_u64(n as u64);
        let stream = common::random(&mut rng, rows * n);
        let weight: Vec<f32> = (0..n).map(|_| rng.random_range(0.5..1.5)).collect();
        let weight = common::upload(gpu, &weight);
        let norm = GpuNorm {
            weight: weight.slice().range(0..n),
            eps: 1e-5,
        };
        // The residual stream, what is normalised, and that in eight bits with its scales.
        let norms = |sum: &dyn Fn(GpuSlice<'_, bf16>, GpuRows<'_>)| {
            let plain = common::poisoned::<bf16>(gpu, rows * n);
            let values = common::poisoned::<u8>(gpu, rows * n);
            let scales = common::upload(gpu, &vec![0.0_f32; count]);
            let hidden = common::upload(gpu, &stream);
            let hidden = hidden.slice().range(0..rows * n);
            sum(hidden, plain.slice().range(0..rows * n).into());
            let once: Vec<bf16> = gpu.download(hidden).unwrap();
            gpu.upload(&stream, hidden).unwrap();
            let fp8 = GpuFp8Rows {
                values: values.slice().range(0..rows * n),
                scales: scales.slice().range(0..count),
                scaling,
            };
            sum(hidden, fp8.into());
            let plain = common::download::<u16>(gpu, &plain, rows * n);
            let bits: Vec<u16> = once.iter().map(|x| x.to_bits()).collect();
            let scales = common::download::<u32>(gpu, &scales, count);
            (
                bits,
                plain,
                common::download::<u8>(gpu, &values, rows * n),
                scales,
            )
        };
        let apart = norms(&|hidden, out| fused.add_rms_norm(hidden, sums, norm, out).unwrap());
        let together = norms(&|hidden, out| {
            kernels
                .add_rms_norm(outputs, [hidden, shared], norm, out)
                .unwrap()
        });
        assert!(apart == together, "{}: norms differ", self.what());
    }

    /// The expert of each place: where rows go is what [`rows_go_where_a_cpu_sends_them`] tests.
    fn experts_of_places(&self) -> Vec<usize> {
        let mut expected = vec![
            Route {
                expert: 0,
                row: 0,
                weight: 0.0
            };
            self.rows * self.top_k
        ];
        let mut logits = self.logits.clone();
        route(
            &mut logits,
            self.gate_up.wide.len(),
            Router::plain(RouterSoftmax::Chosen),
            &mut expected,
        );
        expected.iter().map(|route| route.expert as usize).collect()
    }

    fn check_tiles(&self, gpu: &Gpu, kernels: &MoeKernels, rng: &mut StdRng) {
        for tile in EXPERT_TILES {
            self.check(gpu, kernels, rng, tile);
        }
    }

    fn check(&self, gpu: &Gpu, kernels: &MoeKernels, rng: &mut StdRng, tile: usize) {
        let what = format!("{}, tiles of {tile}", self.what());
        let shared = common::random(rng, self.rows * self.hidden);
        let found = self.run(gpu, kernels, tile, &shared);
        let tolerance = match self.gate_up.format {
            Format::Fp8Blocks | Format::Int4(_) => ROUNDED_TOLERANCE,
            // Tensor cores add products of e4m3 values up with some 14 bits.
            _ if found.scaling.is_some() => ROUNDED_TOLERANCE,
            _ => TOLERANCE,
        };
        let experts = self.experts_of_places();
        let of_place = |place: usize| -> (Vec<f64>, Vec<f64>) {
            let (expert, row) = (experts[place], found.sources[place] as usize / self.top_k);
            let x = &found.taken[row * self.hidden..][..self.hidden];
            let gate_up = self.gate_up.product(expert, x);
            let (gate, up) = gate_up.split_at(self.inner);
            let both = gate.iter().zip(up);
            // Of what the device rounded.
            let inner = &found.inner_taken[place * self.inner..][..self.inner];
            (
                both.map(|(g, u)| activate(self.activation, *g, *u)).collect(),
                self.down.product(expert, inner),
            )
        };
        let places = (0..experts.len()).into_par_iter().map(of_place);
        let (activated, projected): (Vec<_>, Vec<_>) = places.unzip();
        let [activated, projected] = [activated, projected].map(|rows| rows.concat());
        common::assert_close(
            &format!("{what}: gate and up"),
            &common::widen(&found.activated),
            &activated,
            tolerance,
        );
        common::assert_close(
            &format!("{what}: down"),
            &common::widen(&found.projected),
            &projected,
            tolerance,
        );
        let mut sums = vec![0.0; self.rows * self.hidden];
        for (place, &source) in found.sources.iter().enumerate() {
            let (source, weight) = (source as usize, f64::from(found.weights[source as usize]));
            let row = source / self.top_k * self.hidden;
            let one = &found.projected[place * self.hidden..][..self.hidden];
            sums[row..row + self.hidden]
                .iter_mut()
                .zip(one)
                .for_each(|(sum, x)| *sum += weight * x.to_f64());
        }
        if let Some(gates) = &self.gates {
            for (row, gate) in gates.iter().enumerate() {
                let gate = 1.0 / (1.0 + (-f64::from(*gate)).exp());
                for at in row * self.hidden..(row + 1) * self.hidden {
                    sums[at] += gate * shared[at].to_f64();
                }
            }
        }
        common::assert_close(
            &format!("{what}: sums"),
            &common::widen(&found.sums),
            &sums,
            TOLERANCE,
        );
    }

    /// Rows have the same bits again and among others.
    fn check_rows(&self, gpu: &Gpu, kernels: &MoeKernels, tile: usize, rng: &mut StdRng) {
        let shared = common::random(rng, self.rows * self.hidden);
        let bits = |values: &[bf16]| values.iter().map(|x| x.to_bits()).collect::<Vec<u16>>();
        let Outputs {
            sums: all, streams, ..
        } = self.run(gpu, kernels, tile, &shared);
        let again = self.run(gpu, kernels, tile, &shared).sums;
        assert_eq!(bits(&again), bits(&all), "{}, again", self.what());
        for others in [0, 1, rng.random_range(2..40)] {
            // The watched row, then some others, half of which hold what is no number.
            let watched = rng.random_range(0..self.rows);
            let mut chosen = vec![watched];
            chosen.extend((0..others).map(|_| rng.random_range(0..self.rows)));
            let (mut x, logits, gates) = self.rows(&chosen);
            for row in (1..chosen.len()).step_by(2) {
                x[row * self.hidden..][..self.hidden].fill(bf16::NAN);
            }
            let shared: Vec<bf16> = chosen
                .iter()
                .flat_map(|row| shared[row * self.hidden..][..self.hidden].to_vec())
                .collect();
            let some = Self {
                rows: chosen.len(),
                x,
                logits,
                gates,
                gate_up: self.gate_up.clone(),
                down: self.down.clone(),
                ..*self
            };
            let found = some.run(gpu, kernels, tile, &shared);
            let own = &all[watched * self.hidden..][..self.hidden];
            let is_same = bits(&found.sums[..self.hidden]) == bits(own);
            assert!(
                is_same || found.streams != streams,
                "{}, row {watched}",
                self.what()
            );
        }
    }

    /// Some of the rows, in that order.
    fn rows(&self, rows: &[usize]) -> (Vec<bf16>, Vec<f32>, Option<Vec<f32>>) {
        let experts = self.gate_up.wide.len();
        (
            rows.iter()
                .flat_map(|row| self.x[row * self.hidden..][..self.hidden].to_vec())
                .collect(),
            rows.iter()
                .flat_map(|row| self.logits[row * experts..][..experts].to_vec())
                .collect(),
            self.gates
                .as_ref()
                .map(|gates| rows.iter().map(|&row| gates[row]).collect()),
        )
    }
}

struct Outputs {
    sources: Vec<i32>,
    weights: Vec<f32>,
    /// Whether `kernels/moe_stream.cu`, whose sums have another order, computed gate and up, and the second projection.
    streams: [bool; 2],
    /// How the inputs of both projections were quantised; what the first one took, and the second one.
    scaling: Option<Fp8Scaling>,
    taken: Vec<f64>,
    inner_taken: Vec<f64>,
    activated: Vec<bf16>,
    projected: Vec<bf16>,
    sums: Vec<bf16>,
}

/// Runs `run` with `(x, rows, width)`, in eight bits if they are asked for. Returns what it was given.
fn as_taken(
    gpu: &Gpu,
    fused: &FusedKernels,
    scaling: Option<Fp8Scaling>,
    (x, rows, width): (GpuSlice<'_, bf16>, usize, usize),
    run: impl FnOnce(GpuRows<'_>) -> Result<(), GpuError>,
) -> Vec<f64> {
    let Some(scaling) = scaling else {
        run(x.into()).unwrap();
        let taken: Vec<bf16> = gpu.download(x).unwrap();
        return taken.iter().map(|x| x.to_f64()).collect();
    };
    let quantised = Quantised::by(gpu, scaling, rows, width, |out| {
        fused.quantise(x, width, out)?;
        run(out.into())
    });
    quantised.wide()
}

fn activate(activation: ExpertActivation, gate: f64, up: f64) -> f64 {
    match activation {
        ExpertActivation::Glu(activation) => crate::fused::activate(activation, gate) * up,
        ExpertActivation::ClampedSwiglu => {
            let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
            gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)
        }
    }
}

/// The fastest for this GPU, and those for any.
fn all_kernels(gpu: &Gpu) -> [MoeKernels; 2] {
    [
        MoeKernels::load(gpu).unwrap(),
        MoeKernels::load_portable(gpu).unwrap(),
    ]
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn experts_are_what_they_say() {
    let gpu = common::gpu();
    let mut rng = common::rng("experts_are_what_they_say");
    let all_kernels = all_kernels(&gpu);
    for format in Format::ALL {
        for (rows, experts, top_k) in [
            (1, 8, 2),
            (5, 3, 3),
            (33, 1, 1),
            (60, 8, 4),
            (200, 6, 2),
            (400, 4, 2),
        ] {
            let case = Case::random(&gpu, &mut rng, format, rows, experts, top_k);
            for kernels in &all_kernels {
                case.check_tiles(&gpu, kernels, &mut rng);
            }
        }
    }
}

/// So many inputs that each kernel uses its stages again, and a part of one at the end.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn rows_of_many_stages() {
    let gpu = common::gpu();
    let mut rng = common::rng("rows_of_many_stages");
    let kernels = MoeKernels::load(&gpu).unwrap();
    for format in Format::ALL {
        let sizes = match format {
            Format::Bf16 => (1000, 840),
            Format::Fp8 => (1840, 1424),
            Format::Fp8Blocks => (1920, 1408),
            Format::Mxfp4 => (3488, 2880),
            Format::Int4(_) => (3464, 2888),
        };
        // All rows go to both experts.
        for rows in [1, 8, 9, 16] {
            let case = Case::of_sizes(&gpu, &mut rng, format, sizes, [rows, 2, 2]);
            if rows == 16 {
                case.check_tiles(&gpu, &kernels, &mut rng);
            } else {
                case.check(&gpu, &kernels, &mut rng, EXPERT_TILES[0]);
            }
        }
    }
}

/// Sums of so many rows, and of rows so long, that a thread of the norm keeps two vectors.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn sums_of_long_rows_and_many() {
    let gpu = common::gpu();
    let mut rng = common::rng("sums_of_long_rows_and_many");
    let kernels = MoeKernels::load(&gpu).unwrap();
    for (hidden, rows) in [(72, 700), (128, 640), (8256, 2), (8320, 3)] {
        let sizes = (hidden, 16);
        let case = Case::of_sizes(&gpu, &mut rng, Format::Bf16, sizes, [rows, 12, 9]);
        case.check(&gpu, &kernels, &mut rng, EXPERT_TILES[1]);
    }
}

/// All rows to the same experts, so that one has every row and others have none, and rows of a tile and one more.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn full_and_empty_experts() {
    let gpu = common::gpu();
    let mut rng = common::rng("full_and_empty_experts");
    let all_kernels = all_kernels(&gpu);
    for format in Format::ALL {
        for rows in [1, 16, 17, 64, 129, 256] {
            let mut case = Case::random(&gpu, &mut rng, format, rows, 7, 2);
            for row in case.logits.chunks_exact_mut(7) {
                row.copy_from_slice(&[0.0, 1.0, 0.5, 9.0, -1.0, 8.0, 0.0]);
            }
            for kernels in &all_kernels {
                case.check_tiles(&gpu, kernels, &mut rng);
            }
        }
    }
}

/// A row alone, among others in other orders, and beside rows that are no numbers: every bit is the same in tiles of the same size.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_row_depends_on_itself_alone() {
    let gpu = common::gpu();
    let mut rng = common::rng("a_row_depends_on_itself_alone");
    let all_kernels = all_kernels(&gpu);
    for format in Format::ALL {
        for rows in [3, 70, 300] {
            let case = Case::random(&gpu, &mut rng, format, rows, 6, 3);
            for kernels in &all_kernels {
                for tile in EXPERT_TILES {
                    case.check_rows(&gpu, kernels, tile, &mut rng);
                }
            }
        }
    }
}

/// A row of what is no number stays that, and a router's too.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn what_is_no_number_stays_none() {
    let gpu = common::gpu();
    let mut rng = common::rng("what_is_no_number_stays_none");
    let kernels = MoeKernels::load(&gpu).unwrap();
    for activation in ACTIVATIONS {
        let mut case = Case::random(&gpu, &mut rng, Format::Bf16, 3, 5, 2);
        case.activation = activation;
        case.x[case.hidden] = bf16::NAN;
        case.logits[2 * 5 + 1] = f32::NAN;
        let shared = common::random(&mut rng, 3 * case.hidden);
        let sums = case.run(&gpu, &kernels, EXPERT_TILES[0], &shared).sums;
        let rows: Vec<bool> = sums
            .chunks_exact(case.hidden)
            .map(|row| row.iter().all(|x| x.is_nan()))
            .collect();
        assert!(
            sums[..case.hidden].iter().all(|x| x.is_finite()),
            "{activation:?}"
        );
        assert_eq!(rows, [false, true, true], "{activation:?}");
    }
}

/// Nothing is asked of rows that are not there.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn no_rows_are_no_work() {
    let gpu = common::gpu();
    let mut rng = common::rng("no_rows_are_no_work");
    let kernels = MoeKernels::load(&gpu).unwrap();
    let case = Case::random(&gpu, &mut rng, Format::Bf16, 0, 5, 2);
    assert!(case.run(&gpu, &kernels, EXPERT_TILES[0], &[]).sums.is_empty());
}
