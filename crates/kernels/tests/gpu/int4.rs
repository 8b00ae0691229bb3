//! Products of weights in four bits against `x Wᵀ + b` in `f64`, and what they need besides.

mod norms;

use std::sync::Arc;

use half::bf16;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlice};
use plimsoll_kernels::Activation;
use plimsoll_kernels::cuda::{
    GpuLinear, GpuMatrix, GpuWeight, Int4Group, Int4Kernels, LinearCut, LinearOutput, LinearPath, LinearRoom,
    LinearScratch, LinearUse, Linears, TimedWay, has_hopper_kernels, int4_pitch,
};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use crate::common::{self, wide};
use crate::fused::{ACTIVATIONS, activate};
use crate::linear::{linears, paths, written};

/// The ways of other layers, that with inputs in registers, and those of warp groups.
fn ways() -> impl Iterator<Item = Option<LinearPath>> {
    let registers = [Some(LinearPath::Int4Rows)];
    let parts = [1, 2, 4, 8].map(|parts| Some(LinearPath::Int4(parts)));
    paths().into_iter().chain(registers).chain(parts)
}

/// Those of few rows that are divided equally among blocks.
const DIVIDED: [LinearPath; 2] = [LinearPath::Hopper, LinearPath::Int4Rows];

/// The most rows of one of [`DIVIDED`].
fn most_rows(path: LinearPath, group: Int4Group) -> usize {
    match path {
        LinearPath::Int4Rows if group == Int4Group::Of32 => 16,
        LinearPath::Int4Rows => 24,
        _ => 32,
    }
}

const GROUPS: [Int4Group; 3] = [Int4Group::Of32, Int4Group::Of64, Int4Group::Of128];

/// Sums are rounded to bf16 once, and so are weights on their way to cuBLASLt and to warp groups.
const TOLERANCE: f64 = 4e-3;

/// What becomes of rows of so many sums, of the gate and then of the up projection.
fn gated(sums: &[f64], n: usize, activation: Activation) -> Vec<f64> {
    let rows = sums.chunks_exact(n).flat_map(|row| {
        let (gate, up) = row.split_at(n / 2);
        let pairs = gate.iter().zip(up);
        pairs.map(|(gate, up)| activate(activation, *gate) * up)
    });
    rows.collect()
}

#[derive(Clone)]
struct Case {
    group: Int4Group,
    m: usize,
    n: usize,
    k: usize,
    x: Vec<bf16>,
    /// `[n, k]`, in the matrix's order.
    codes: Vec<u8>,
    /// `[n, groups]`.
    zeros: Vec<u8>,
    scales: Vec<f32>,
    bias: Option<Vec<bf16>>,
    order: Option<Vec<u32>>,
}

impl Case {
    fn random(rng: &mut StdRng, group: Int4Group, [m, n, k]: [usize; 3], bias: bool, ordered: bool) -> Self {
        let groups = n * k.div_ceil(group.inputs());
        let mut order: Vec<u32> = (0..k as u32).collect();
        order.shuffle(rng);
        Self {
            group,
            m,
            n,
            k,
            x: common::random(rng, m * k),
            codes: (0..n * k).map(|_| rng.random_range(0..16)).collect(),
            zeros: (0..groups).map(|_| rng.random_range(0..16)).collect(),
            // Of either sign, and of more bits than bf16 has.
            scales: (0..groups)
                .map(|_| half::f16::from_f32(rng.random_range(-0.1..0.1)).to_f32())
                .collect(),
            bias: bias.then(|| common::random(rng, n)),
            order: ordered.then_some(order),
        }
    }

    fn weight(&self, row: usize, input: usize) -> f64 {
        let group = row * self.k.div_ceil(self.group.inputs()) + input / self.group.inputs();
        let steps = i32::from(self.codes[row * self.k + input]) - i32::from(self.zeros[group]);
        f64::from(steps) * f64::from(self.scales[group])
    }

    /// The product of these inputs.
    fn reference(&self, x: &[f64]) -> Vec<f64> {
        let &Self { n, k, .. } = self;
        let weight = (0..n * k).into_par_iter().map(|at| self.weight(at / k, at % k));
        let weight: Vec<f64> = weight.collect();
        let input = |place: usize| self.order.as_ref().map_or(place, |order| order[place] as usize);
        let rows = x.chunks_exact(k);
        let ordered = rows.flat_map(|x| (0..k).map(|place| x[input(place)]));
        let ordered: Vec<f64> = ordered.collect();
        common::product(&ordered, &weight, k, self.bias.as_deref())
    }

    /// As `kernels/include/int4.cuh` says.
    fn matrix(&self, gpu: &Gpu) -> GpuMatrix {
        let &Self { group, n, k, .. } = self;
        let (pitch, stride) = (int4_pitch(k), group.stride(k));
        let mut rows = vec![0x5a_u8; n * pitch];
        let mut words = vec![0; n * stride];
        let eights = rows
            .par_chunks_mut(8 * pitch)
            .zip(words.par_chunks_mut(8 * stride));
        eights.enumerate().for_each(|(at, (rows, words))| {
            for of_eight in 0..8 {
                let row = 8 * at + of_eight;
                for input in 0..k {
                    let (window, part, eight, place) =
                        (input / 128, input % 128 / 32, input % 32 / 8, input % 8);
                    let piece = 16 * (window * 8 + of_eight) + 4 * (place / 2) + part;
                    let byte = 4 * piece + place % 2 * 2 + eight / 2;
                    let shift = eight % 2 * 4;
                    rows[byte] = rows[byte] & !(15 << shift) | self.codes[row * k + input] << shift;
                }
                let groups = k.div_ceil(group.inputs());
                for at in 0..stride {
                    let from = row * groups + at.min(groups - 1);
                    let in_window = 128 / group.inputs();
                    let of_window = at / in_window * 8 + of_eight;
                    words[of_window * in_window + at % in_window] =
                        Int4Group::word(self.scales[from], self.zeros[from]);
                }
            }
        });
        let order = self.order.as_ref().map(|order| {
            let slab = Arc::new(common::upload(gpu, order));
            GpuWeight::new(&slab, 0..k)
        });
        GpuMatrix::Int4 {
            codes: GpuWeight::new(&Arc::new(common::upload(gpu, &rows)), 0..rows.len()),
            groups: GpuWeight::new(&Arc::new(common::upload(gpu, &words)), 0..words.len()),
            group,
            order,
        }
    }

    fn layer(&self, gpu: &Gpu) -> GpuLinear {
        let bias = self.bias.as_ref().map(|bias| {
            let slab = Arc::new(common::upload(gpu, bias));
            GpuWeight::new(&slab, 0..self.n)
        });
        GpuLinear::new(self.matrix(gpu), bias, self.n, self.k)
    }

    /// What `run` writes, given room, inputs and the layer.
    fn written<T: Pod>(
        &self,
        gpu: &Gpu,
        len: usize,
        run: impl FnOnce(LinearRoom<'_>, GpuSlice<'_, bf16>, &GpuLinear, GpuSlice<'_, T>) -> Result<(), GpuError>,
    ) -> Vec<T> {
        let &Self { m, n, k, .. } = self;
        let (layer, x) = (self.layer(gpu), common::upload(gpu, &self.x));
        let [weights, inputs] = [n * k, m * k].map(|len| common::poisoned::<bf16>(gpu, len));
        let room = LinearRoom {
            weights: Some(weights.slice()),
            inputs: Some(inputs.slice()),
        };
        written(gpu, len, |out| {
            run(room, x.slice(), &layer, out.slice().range(0..len))
        })
    }

    fn forward(&self, gpu: &Gpu, linears: &Linears, output: LinearOutput) -> Vec<bf16> {
        let len = self.m * self.n / if output == LinearOutput::Bf16 { 1 } else { 2 };
        self.written(gpu, len, |room, x, layer, out| {
            linears.forward_in(room, x, layer, output, out)
        })
    }

    /// Rows of outputs that are wider than those: what is behind them stays.
    fn check_wider(&self, gpu: &Gpu, linears: &Linears, wider: usize, way: &str) {
        let &Self { m, n, .. } = self;
        let what = self.what(&format!("{way}, rows wider by {wider}"));
        let pitch = n + wider;
        let all = self.written(gpu, m * pitch, |room, x, layer, out| {
            linears.forward_in(room, x, layer, LinearOutput::Bf16, out)
        });
        let rows = all.chunks_exact(pitch).map(|row| row.split_at(n));
        let (found, behind): (Vec<&[bf16]>, Vec<&[bf16]>) = rows.unzip();
        let reference = self.reference(&wide(&self.x));
        common::assert_close(&what, &common::widen(&found.concat()), &reference, TOLERANCE);
        let untouched = behind.concat().iter().all(|x| x.to_bits() == u16::MAX);
        assert!(untouched, "{what}: behind the outputs");
    }

    fn check_f32(&self, gpu: &Gpu, linears: &Linears, way: &str) {
        let out: Vec<f32> = self.written(gpu, self.m * self.n, |room, x, layer, out| {
            linears.forward_f32_in(room, x, layer, out)
        });
        let what = self.what(&format!("{way}, f32"));
        common::assert_close(&what, &out, &self.reference(&wide(&self.x)), TOLERANCE);
    }

    fn what(&self, way: &str) -> String {
        let Self { group, m, n, k, .. } = self;
        let (bias, order) = (self.bias.is_some(), self.order.is_some());
        format!("{way} {group:?} [{m}, {k}] x [{n}, {k}] bias {bias} order {order}")
    }

    fn check(&self, gpu: &Gpu, linears: &Linears, way: &str) {
        let &Self { m, n, .. } = self;
        let what = self.what(way);
        let reference = self.reference(&wide(&self.x));
        let out = self.forward(gpu, linears, LinearOutput::Bf16);
        common::assert_close(&what, &common::widen(&out), &reference, TOLERANCE);
        if self.bias.is_some() || !n.is_multiple_of(2) {
            return;
        }
        let layer = self.layer(gpu);
        for activation in ACTIVATIONS {
            if !linears.fuses_glu(m, &layer, activation) {
                continue;
            }
            let out = self.forward(gpu, linears, LinearOutput::Glu(activation));
            let what = format!("{what} {activation:?}");
            let gated = gated(&reference, n, activation);
            common::assert_close(&what, &common::widen(&out), &gated, TOLERANCE);
        }
        self.check_norm(gpu, linears, &what, &norms::NORMS, 6e-3);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn products_match_the_reference() {
    let gpu = common::gpu();
    let mut rng = common::rng("int4, products");
    let mut linears = linears(&gpu);
    for path in ways() {
        linears.fix(path);
        let way = path.map_or("default".to_owned(), |path| format!("{path:?}"));
        for group in GROUPS {
            for (n, k) in [
                (16, 256),
                (96, 512),
                (136, 768),
                (264, 1024),
                (1024, 4096),
                (160, 14336),
            ] {
                let m = [1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 70][rng.random_range(0..11)];
                let (bias, ordered) = (rng.random(), rng.random());
                Case::random(&mut rng, group, [m, n, k], bias, ordered).check(&gpu, &linears, &way);
                // The norm is a part of it.
                let m = rng.random_range(1..=4);
                Case::random(&mut rng, group, [m, n, k], false, false).check(&gpu, &linears, &way);
            }
        }
    }
    linears.fix(None);
    for group in GROUPS {
        Case::random(&mut rng, group, [5, 20_000, 256], false, false).check(&gpu, &linears, "many outputs");
        // Rows that are not whole lines, or not whole windows.
        for k in [8, 128, 136, 640, 1000] {
            let m = rng.random_range(1..40);
            Case::random(&mut rng, group, [m, 48, k], true, true).check(&gpu, &linears, "not whole lines");
        }
    }
}

/// Several tiles of rows, inputs that are whole windows and no more, and rows of outputs that are wider: what is behind the outputs stays.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn warp_groups_compute_any_number_of_rows() {
    let gpu = common::gpu();
    let mut rng = common::rng("int4, tiles of rows");
    let mut linears = linears(&gpu);
    for (group, parts) in GROUPS
        .into_iter()
        .flat_map(|group| [1, 2, 4, 8].map(|parts| (group, parts)))
    {
        linears.fix(Some(LinearPath::Int4(parts)));
        for (m, n, k, wider) in [
            (1, 136, 1024, 6),
            (16, 136, 2176, 1),
            (17, 136, 2304, 0),
            (32, 136, 2176, 3),
            (64, 136, 1152, 0),
            (128, 136, 1152, 0),
            (129, 264, 1664, 0),
            (300, 96, 1920, 7),
        ] {
            let bias = rng.random();
            let case = Case::random(&mut rng, group, [m, n, k], bias, false);
            case.check_wider(&gpu, &linears, wider, &format!("k among {parts} blocks"));
        }
    }
}

/// Stages or slabs of few tiles and of many, divided equally; inputs that are not whole windows; all kinds of outputs.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn few_rows_are_divided_equally_among_blocks() {
    let gpu = common::gpu();
    let mut rng = common::rng("int4, few rows");
    let mut linears = linears(&gpu);
    for (path, group) in DIVIDED
        .into_iter()
        .flat_map(|path| GROUPS.map(|group| (path, group)))
    {
        linears.fix(Some(path));
        let way = format!("{path:?}");
        for (m, n, k, wider) in [
            (1, 8, 8, 2),
            (2, 48, 136, 0),
            (7, 136, 128, 6),
            (8, 1040, 384, 0),
            (9, 6144, 640, 4),
            (13, 2064, 4096, 0),
            (16, 128, 14336, 2),
            (17, 6144, 1000, 0),
            (24, 336, 8960, 8),
            (32, 20_000, 512, 0),
            (32, 2048, 2176, 10),
        ] {
            if m > most_rows(path, group) {
                continue;
            }
            let bias = rng.random();
            let case = Case::random(&mut rng, group, [m, n, k], bias, false);
            if has_hopper_kernels(&gpu) {
                let is_own = linears.is_own(m, &case.layer(&gpu), LinearOutput::Bf16);
                assert!(is_own, "{}", case.what(&way));
            }
            case.check_wider(&gpu, &linears, wider, &way);
            let case = Case { bias: None, ..case };
            if has_hopper_kernels(&gpu) && n.is_multiple_of(16) {
                let fuses = linears.fuses_glu(m, &case.layer(&gpu), Activation::Silu);
                assert!(fuses, "{}", case.what("gated"));
            }
            case.check(&gpu, &linears, &way);
            case.check_f32(&gpu, &linears, &way);
            let ordered = Case::random(&mut rng, group, [m, n, k], bias, true);
            ordered.check(&gpu, &linears, &way);
            // NaN in a row makes all its outputs NaN: no block waits for a sum that never arrives.
            let mut case = case;
            case.x[0] = bf16::NAN;
            let out = case.forward(&gpu, &linears, LinearOutput::Bf16);
            assert!(out[..n].iter().all(|x| x.is_nan()), "{}", case.what("NaN"));
            assert!(out[n..].iter().all(|x| x.is_finite()), "{}", case.what("NaN"));
        }
    }
}

/// More inputs than a block holds, so more slabs than one, and so many tiles that each warp adds up several and the ring goes round;
/// launches one after the other, which find the exchange as it was.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn slabs_of_many_tiles_are_added_up() {
    let gpu = common::gpu();
    let mut rng = common::rng("int4, slabs");
    let mut linears = linears(&gpu);
    linears.fix(Some(LinearPath::Int4Rows));
    for (m, k) in [(8, 4224), (16, 4224), (24, 2176)] {
        let case = Case::random(&mut rng, Int4Group::Of128, [m, 20_000, k], false, false);
        if has_hopper_kernels(&gpu) {
            let is_own = linears.is_own(m, &case.layer(&gpu), LinearOutput::Bf16);
            assert!(is_own, "{}", case.what("inputs in registers"));
        }
        case.check(&gpu, &linears, "inputs in registers");
        let first = case.forward(&gpu, &linears, LinearOutput::Bf16);
        let second = case.forward(&gpu, &linears, LinearOutput::Bf16);
        let bits = |out: &[bf16]| out.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&first), bits(&second), "{}", case.what("two runs"));
    }
}

/// One to three tiles for each block, the last of them not whole; inputs that are not whole windows, or fewer windows than warps; all
/// kinds of outputs.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn few_rows_go_from_tile_to_tile() {
    let gpu = common::gpu();
    let mut rng = common::rng("int4, tiles of few rows");
    let mut linears = linears(&gpu);
    for group in GROUPS {
        for (row_warps, blocks_per_sm, tiles, m, k, wider) in [
            (1, 1, 1, 1, 8, 2),
            (1, 1, 2, 2, 136, 0),
            (1, 1, 3, 5, 1000, 6),
            (1, 2, 3, 8, 136, 0),
            (2, 1, 2, 1, 256, 4),
            (2, 2, 3, 4, 640, 2),
            (4, 1, 2, 2, 256, 0),
            (8, 1, 1, 8, 136, 0),
            (8, 2, 2, 3, 72, 2),
        ] {
            linears.fix(Some(LinearPath::Stream(LinearCut {
                row_warps,
                cluster: 1,
                blocks_per_sm,
            })));
            let n = gpu.info().sm_count * blocks_per_sm * row_warps * 16 * tiles;
            let what = format!("{row_warps} rows of warps, {blocks_per_sm} blocks, {tiles} tiles");
            let case = Case::random(&mut rng, group, [m, n - 8, k], m % 2 == 0, false);
            // Those of `linear.cu` want multiples of 256 inputs.
            let is_own = linears.is_own(m, &case.layer(&gpu), LinearOutput::Bf16);
            assert!(is_own, "{}", case.what(&what));
            case.check_wider(&gpu, &linears, wider, &what);
            // Half as many outputs, if gated, are whole eights.
            let case = Case::random(&mut rng, group, [m, n - 16, k], false, false);
            let fuses = linears.fuses_glu(m, &case.layer(&gpu), Activation::Silu);
            assert!(fuses, "{}", case.what(&what));
            case.check(&gpu, &linears, &what);
            case.check_f32(&gpu, &linears, &what);
        }
    }
}

/// Same bits in every run, whatever the other rows hold.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn rows_are_independent() {
    const SHAPE: [usize; 2] = [208, 2048];
    let gpu = common::gpu();
    let mut rng = common::rng("int4, rows of products");
    let mut linears = linears(&gpu);
    for path in ways() {
        linears.fix(path);
        for (group, m) in GROUPS
            .into_iter()
            .flat_map(|group| [2, 4, 8, 16, 24, 40].map(|m| (group, m)))
        {
            let [n, k] = SHAPE;
            let mut case = Case::random(&mut rng, group, [m, n, k], true, m == 8);
            let what = case.what(&format!("{path:?}"));
            let first_row = |case: &Case| -> Vec<u16> {
                let out = case.forward(&gpu, &linears, LinearOutput::Bf16);
                out[..n].iter().map(|x| x.to_bits()).collect()
            };
            let first = first_row(&case);
            assert_eq!(first, first_row(&case), "{what}: two runs");
            case.x[k..].fill(bf16::NAN);
            assert_eq!(first, first_row(&case), "{what}: NaN in other rows");
        }
    }
}

/// Measures products of the case's layer with so many rows.
fn measure(
    gpu: &Gpu,
    linears: &mut Linears,
    case: &Case,
    outputs: &[LinearOutput],
    rows: &[usize],
    agree: fn(&mut [TimedWay]) -> Result<(), GpuError>,
) {
    let &Case { n, k, .. } = case;
    let most = rows.iter().max().expect("numbers of rows");
    let [x, weights] = [most * k, n * k].map(|len| common::poisoned::<bf16>(gpu, len));
    let out = common::poisoned::<f32>(gpu, most * n);
    let layers = [&case.layer(gpu)];
    let uses = outputs.iter().map(|&output| LinearUse {
        layers: &layers,
        output,
        rows,
    });
    let scratch = LinearScratch {
        x: x.slice(),
        out: out.slice(),
        weights: weights.slice(),
    };
    let uses: Vec<LinearUse<'_>> = uses.collect();
    let measured = linears.measure_together(&uses, scratch, &mut { agree });
    measured.expect("measurements");
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn measured_choices() {
    let gpu = common::gpu();
    let mut rng = common::rng("int4, measured");
    let outputs = [LinearOutput::Bf16, LinearOutput::Glu(Activation::Silu)];
    let (n, k) = (1040, 512);
    for group in GROUPS {
        let mut linears = linears(&gpu);
        let case = Case::random(&mut rng, group, [1, n, k], false, false);
        let rows = [1, 8, 16, 32, 64, 256];
        measure(&gpu, &mut linears, &case, &outputs, &rows, |_| Ok(()));
        for m in [1, 3, 8, 13, 20, 33, 64, 100, 300] {
            let case = Case::random(&mut rng, group, [m, n, k], false, m % 2 == 0);
            case.check(&gpu, &linears, "measured");
        }
    }
}

/// What was measured for fewer rows counts for more, even where their kernel cannot divide k so.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn more_rows_than_were_measured() {
    let Some(gpu) = common::hopper() else { return };
    let mut rng = common::rng("int4, more rows than measured");
    // A tile for each block: one slab is best for 16 rows.
    let (n, k) = (16 * gpu.info().sm_count, 4096);
    for group in GROUPS {
        let mut linears = linears(&gpu);
        let case = Case::random(&mut rng, group, [1, n, k], false, false);
        let outputs = [LinearOutput::Bf16];
        // No way but that with inputs in registers: see `Choice::number`.
        measure(&gpu, &mut linears, &case, &outputs, &[8, 16], |ways| {
            let others = ways.iter_mut().filter(|way| way.way >> 20 != 1);
            others.for_each(|way| way.us = f32::INFINITY);
            Ok(())
        });
        let choices = linears.choices();
        let is_one_slab = choices[1].path.contains("in registers, 1 slab");
        assert!(choices[1].rows == 16 && is_one_slab, "{choices:?}");
        for m in [16, 17, 20, 24] {
            let case = Case::random(&mut rng, group, [m, n, k], false, false);
            case.check(&gpu, &linears, "measured for fewer rows");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn made_up_codes_are_spread_evenly() {
    let gpu = common::gpu();
    let kernels = Int4Kernels::load(&gpu).expect("kernels");
    let len = 1 << 20;
    let found: Vec<u8> = written(&gpu, len, |out| kernels.fill(out.slice().range(0..len), 3));
    let mut counts = [0_usize; 16];
    for byte in found {
        counts[usize::from(byte & 15)] += 1;
        counts[usize::from(byte >> 4)] += 1;
    }
    let mean = len / 8;
    let is_even = counts.iter().all(|&count| count.abs_diff(mean) < mean / 50);
    assert!(is_even, "{counts:?}");
}

#[test]
fn words_hold_scales_of_sixteen_bits() {
    for bits in 0..=u16::MAX {
        for scale in [
            half::f16::from_bits(bits).to_f32(),
            bf16::from_bits(bits).to_f32(),
        ] {
            let zero = (bits % 16) as u8;
            let word = Int4Group::word(scale, zero);
            if scale.is_finite() && (scale == 0.0 || scale.is_normal()) {
                assert_eq!(f32::from_bits(word & !15), scale, "{bits:#x}");
            }
            assert_eq!(word & 15, u32::from(zero));
        }
    }
    // Others are rounded to 20 bits.
    let word = Int4Group::word(0.1, 5);
    assert!((f32::from_bits(word & !15) - 0.1).abs() < 0.1 / f32::from(1_u16 << 15) / 16.0);
}
