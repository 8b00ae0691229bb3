//! The linear layers of Llama-3.1-8B's shape: one by one, and as the chain of a decode step.

use std::sync::Arc;
use std::time::Instant;

use half::bf16;
use plimsoll_core::Component;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab, GpuSlice};
use plimsoll_kernels::cuda::{
    Fp8Scaling, FusedKernels, GpuLinear, GpuMatrix, GpuNorm, GpuResidual, GpuValues, GpuWeight, Int4Group,
    LinearCut, LinearOutput, LinearPath, LinearRoom, LinearScratch, LinearUse, Linears, int4_pitch,
};
use plimsoll_kernels::{Activation, GgufFormat};

use crate::common::{BF16_RATE, READ_BANDWIDTH, time_us};

const LAYERS: usize = 32;
const MAX_ROWS: usize = 8192;

/// Name, n, k.
pub(crate) const SHAPES: [(&str, usize, usize); 5] = [
    ("qkv", 6144, 4096),
    ("o", 4096, 4096),
    ("gate_up", 28672, 4096),
    ("down", 4096, 14336),
    ("lm_head", 128_256, 4096),
];

pub(crate) struct Model {
    /// Of each shape, all layers.
    pub(crate) layers: Vec<Vec<GpuLinear>>,
    pub(crate) x: GpuSlab,
    pub(crate) out: GpuSlab,
}

impl Model {
    /// The head is always bf16.
    pub(crate) fn new(gpu: &Gpu, values: GpuValues) -> Self {
        let per_layer: usize = SHAPES[..4].iter().map(|(_, n, k)| n * k).sum();
        let (_, vocab, hidden) = SHAPES[4];
        let total = per_layer * LAYERS + vocab * hidden;
        let slab = Arc::new(
            gpu.alloc(Component::Weights, total * 2)
                .expect("room for weights"),
        );
        noise(gpu, &slab);
        let mut at = 0;
        let mut layers: Vec<Vec<GpuLinear>> = SHAPES.iter().map(|_| Vec::new()).collect();
        for layer in 0..LAYERS {
            for (shape, &(_, n, k)) in SHAPES.iter().enumerate() {
                if shape < 4 || layer == 0 {
                    let matrix = match values {
                        GpuValues::Int4(group) if shape < 4 => GpuMatrix::Int4 {
                            codes: GpuWeight::new(&slab, 2 * at..2 * at + n * int4_pitch(k)),
                            groups: GpuWeight::new(&slab, 0..n * group.stride(k)),
                            group,
                            order: None,
                        },
                        GpuValues::Gguf(format) if shape < 4 => GpuMatrix::Gguf {
                            rows: GpuWeight::new(&slab, 2 * at..2 * at + n * format.pitch(k)),
                            format,
                        },
                        GpuValues::Fp8(scaling) if shape < 4 => GpuMatrix::Fp8 {
                            values: GpuWeight::new(&slab, 2 * at..2 * at + n * k),
                            // Any numbers will do.
                            scales: GpuWeight::new(&slab, 0..scaling.weight_scales(n, k)),
                            scaling,
                        },
                        _ => GpuMatrix::Bf16(GpuWeight::new(&slab, at..at + n * k)),
                    };
                    layers[shape].push(GpuLinear::new(matrix, None, n, k));
                    at += n * k;
                }
            }
        }
        let x = gpu.alloc(Component::Arena, MAX_ROWS * 14336 * 2).expect("room");
        noise(gpu, &x);
        let out = gpu.alloc(Component::Arena, MAX_ROWS * 28672 * 2).expect("room");
        Self { layers, x, out }
    }
}

/// Fills a slab with pseudo-random values of about 0.01, repeated.
fn noise(gpu: &Gpu, slab: &GpuSlab) {
    const BLOCK: usize = 1 << 22;
    let mut state = 1_u32;
    let values: Vec<bf16> = (0..BLOCK)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bf16::from_f32(((state >> 8) as f32 / (1 << 24) as f32 - 0.5) * 0.02)
        })
        .collect();
    let all = slab.slice::<bf16>();
    let first = BLOCK.min(all.len());
    gpu.upload(&values[..first], all.range(0..first))
        .expect("an upload");
    for at in (BLOCK..all.len()).step_by(BLOCK) {
        let end = (at + BLOCK).min(all.len());
        gpu.copy(all.range(0..end - at), all.range(at..end))
            .expect("a copy");
    }
}

pub(crate) fn bench(gpu: &Gpu) {
    let workspace = gpu
        .alloc(Component::Runtime, Linears::WORKSPACE_BYTES)
        .expect("room");
    let start = Instant::now();
    let mut linears = Linears::load(gpu, workspace).expect("cuBLASLt and kernels");
    println!(
        "libraries and kernels loaded in {:.0} ms",
        start.elapsed().as_secs_f64() * 1e3
    );
    let model = Model::new(gpu, GpuValues::Bf16);
    println!("one kind of layer after another, us; % of the floor");
    println!(
        "{:8} {:>4} {:>7} {:>14} {:>14}  row_warps x cluster x blocks on a multiprocessor",
        "layer", "m", "floor", "cuBLASLt", "stream-K"
    );
    for (shape, (name, n, k)) in SHAPES.iter().enumerate() {
        for m in [1, 8, 16, 32] {
            let floor = floor_us(m, *n, *k);
            print!("{name:8} {m:4} {floor:7.1}");
            linears.fix(Some(LinearPath::CublasLt));
            let us = time_layer(gpu, &linears, &model, shape, m);
            print!(" {us:7.1} {:5.1}%", 100.0 * floor / us);
            linears.fix(Some(LinearPath::Hopper));
            if linears.is_own(m, &model.layers[shape][0], LinearOutput::Bf16) {
                let us = time_layer(gpu, &linears, &model, shape, m);
                print!(" {us:7.1} {:5.1}%", 100.0 * floor / us);
            } else {
                print!(" {:>14}", "-");
            }
            for cut in cuts() {
                linears.fix(Some(LinearPath::Stream(cut)));
                if linears.is_own(m, &model.layers[shape][0], LinearOutput::Bf16) {
                    let us = time_layer(gpu, &linears, &model, shape, m);
                    print!(" {cut} {us:.1} {:.0}%", 100.0 * floor / us);
                }
            }
            println!();
        }
    }
    linears.fix(None);
    for values in [
        GpuValues::Fp8(Fp8Scaling::Rows),
        GpuValues::Fp8(Fp8Scaling::Blocks),
        GpuValues::Int4(Int4Group::Of128),
        GpuValues::Int4(Int4Group::Of64),
        GpuValues::Int4(Int4Group::Of32),
    ]
    .into_iter()
    .chain(GgufFormat::ALL.map(GpuValues::Gguf))
    {
        println!("{values:?} weights, bf16 inputs, us; % of the floor; (with silu(gate) * up)");
        stream_few_bits(gpu, &mut linears, values);
    }
    linears.fix(None);
    println!(
        "qkv, o, gate_up (with silu(gate) * up where fused), down of {LAYERS} layers and lm_head, ms; % of the floor"
    );
    let ways = [
        ("own", None),
        ("cuBLASLt", Some(LinearPath::CublasLt)),
        ("stream-K", Some(LinearPath::Hopper)),
    ];
    for (name, path) in ways {
        linears.fix(path);
        time_chain(gpu, &linears, &model, name);
    }
    linears.fix(None);
    let rows = [
        1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192,
    ];
    measure(&mut linears, &model, &rows);
    time_chain(gpu, &linears, &model, "fastest");
    let norms = Norms::new(gpu);
    println!("as above with the norms ahead of qkv and gate_up: kernels of their own; in the product");
    for m in [1, 2, 4, 8, 16, 32, 64, 256] {
        let times = [false, true].map(|fuse| time_us(gpu, 1, |_| norms.chain(&linears, &model, m, fuse)));
        println!("m {m:4}: {:.3} {:.3}", times[0] / 1e3, times[1] / 1e3);
    }
}

/// All ways in which our own kernels cut products.
fn cuts() -> impl Iterator<Item = LinearCut> {
    LinearCut::SIZES.into_iter().flat_map(|(row_warps, cluster)| {
        [1, 2].map(|blocks_per_sm| LinearCut {
            row_warps,
            cluster,
            blocks_per_sm,
        })
    })
}

/// Room for the largest matrix of a layer in bf16, which cuBLASLt's products of few bits need.
fn room_for_bf16(gpu: &Gpu) -> GpuSlab {
    gpu.alloc(Component::Arena, 28672 * 4096 * size_of::<bf16>())
        .expect("room")
}

const WAYS_OF_INT4: [LinearPath; 7] = [
    LinearPath::Hopper,
    LinearPath::Int4Rows,
    LinearPath::Int4(1),
    LinearPath::Int4(2),
    LinearPath::Int4(4),
    LinearPath::Int4(8),
    LinearPath::CublasLt,
];

/// Weights of four bits: by the kernels for Hopper, and dequantised for cuBLASLt.
pub(crate) fn bench_int4(gpu: &Gpu) {
    let workspace = gpu
        .alloc(Component::Runtime, Linears::WORKSPACE_BYTES)
        .expect("room");
    let mut linears = Linears::load(gpu, workspace).expect("cuBLASLt and kernels");
    let widened = room_for_bf16(gpu);
    let room = LinearRoom {
        weights: Some(widened.slice()),
        inputs: None,
    };
    for group in [Int4Group::Of128, Int4Group::Of32] {
        let model = Model::new(gpu, GpuValues::Int4(group));
        println!(
            "{group:?}, us: floor, stream-K, inputs in registers, k divided among 1, 2, 4 and 8 blocks, dequantised for cuBLASLt, streamed (best cut)"
        );
        for (shape, &(name, n, k)) in SHAPES[..4].iter().enumerate() {
            for m in [1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 256, 512, 1024, 2048] {
                let bytes = n * int4_pitch(k) + 4 * n * group.stride(k) + 2 * m * (k + n);
                let operations = 2.0 * (m * n * k) as f64;
                let floor = f64::max(bytes as f64 / READ_BANDWIDTH, operations / BF16_RATE) * 1e6;
                print!("{name:8} {m:4} {floor:7.1} ");
                let layers = &model.layers[shape];
                let mut time = |path: LinearPath| -> Option<f64> {
                    linears.fix(Some(path));
                    let is_own = linears.is_own(m, &layers[0], LinearOutput::Bf16);
                    let must_be_own = matches!(
                        path,
                        LinearPath::Hopper | LinearPath::Int4Rows | LinearPath::Stream(_)
                    );
                    if !is_own && must_be_own {
                        return None;
                    }
                    Some(time_us(gpu, 8, |call| {
                        let x = model.x.slice().range(0..m * k);
                        let out = model.out.slice().range(0..m * n);
                        linears.forward_in(room, x, &layers[call % layers.len()], LinearOutput::Bf16, out)
                    }))
                };
                for path in WAYS_OF_INT4 {
                    match time(path) {
                        Some(us) => print!(" {us:8.1}"),
                        None => print!(" {:>8}", "-"),
                    }
                }
                let streamed = cuts().filter_map(|cut| Some((cut, time(LinearPath::Stream(cut))?)));
                match streamed.min_by(|(_, a), (_, b)| a.total_cmp(b)) {
                    Some((cut, us)) => println!(" {us:8.1} ({cut})"),
                    None => println!(" {:>8}", "-"),
                }
            }
        }
    }
}

fn stream_few_bits(gpu: &Gpu, linears: &mut Linears, values: GpuValues) {
    let model = Model::new(gpu, values);
    let widened = room_for_bf16(gpu);
    let room = LinearRoom {
        weights: Some(widened.slice()),
        inputs: None,
    };
    for (shape, (name, n, k)) in SHAPES[..4].iter().enumerate() {
        for m in [1, 4, 8, 16] {
            let weights = match values {
                GpuValues::Bf16 => 2 * n * k,
                GpuValues::Fp8(_) => n * k,
                GpuValues::Int4(group) => n * int4_pitch(*k) + 4 * n * group.stride(*k),
                GpuValues::Gguf(format) => n * format.pitch(*k),
            };
            let floor = 1e6 * (weights + 2 * m * k + 2 * m * n) as f64 / READ_BANDWIDTH;
            print!("{name:8} {m:4} {floor:7.1}");
            for cut in cuts() {
                linears.fix(Some(LinearPath::Stream(cut)));
                let layers = &model.layers[shape];
                let layer = &layers[0];
                if !linears.is_own(m, layer, LinearOutput::Bf16) {
                    continue;
                }
                let us = time_us(gpu, 2 * layers.len(), |call| {
                    let x = model.x.slice().range(0..m * k);
                    let out = model.out.slice().range(0..m * n);
                    let layer = &layers[call % layers.len()];
                    linears.forward_in(room, x, layer, LinearOutput::Bf16, out)
                });
                print!(" {cut} {us:.1} {:.0}%", 100.0 * floor / us);
                if *name == "gate_up" && linears.fuses_glu(m, layer, Activation::Silu) {
                    let us = time_us(gpu, 2 * layers.len(), |call| {
                        let x = model.x.slice().range(0..m * k);
                        let out = model.out.slice().range(0..m * n / 2);
                        let output = LinearOutput::Glu(Activation::Silu);
                        linears.forward_in(
                            LinearRoom::default(),
                            x,
                            &layers[call % layers.len()],
                            output,
                            out,
                        )
                    });
                    print!(" ({us:.1})");
                }
            }
            println!();
        }
    }
}

/// What the norms between linear layers need.
struct Norms {
    kernels: FusedKernels,
    weight: GpuSlab,
    hidden: [GpuSlab; 2],
    normed: GpuSlab,
}

impl Norms {
    fn new(gpu: &Gpu) -> Self {
        let alloc = |bytes| {
            let slab = gpu.alloc(Component::Arena, bytes).expect("room");
            noise(gpu, &slab);
            slab
        };
        let rows = || alloc(256 * 4096 * 2);
        Self {
            kernels: FusedKernels::load(gpu).expect("kernels"),
            weight: alloc(4096 * 4),
            hidden: [rows(), rows()],
            normed: rows(),
        }
    }

    /// The products of a decode step with their norms.
    fn chain(&self, linears: &Linears, model: &Model, m: usize, fuse: bool) -> Result<(), GpuError> {
        let (delta, out) = (model.x.slice::<bf16>(), model.out.slice::<bf16>());
        let delta = delta.range(0..m * 4096);
        let mut hidden = [0, 1].map(|at| self.hidden[at].slice::<bf16>().range(0..m * 4096));
        let normed = self.normed.slice::<bf16>().range(0..m * 4096);
        let norm = GpuNorm {
            weight: self.weight.slice(),
            eps: 1e-5,
        };
        let mut product = |layer: &GpuLinear, output: LinearOutput, out: GpuSlice<'_, bf16>| {
            if fuse && linears.fuses_norm(m, layer, output) {
                let [from, to] = hidden;
                let input = GpuResidual {
                    hidden: from,
                    delta,
                    norm,
                    sum: to,
                };
                hidden = [to, from];
                return linears.forward_norm(&input, layer, output, out);
            }
            self.kernels.add_rms_norm(hidden[0], delta, norm, normed)?;
            match output {
                LinearOutput::Glu(_) => linears.forward_in(LinearRoom::default(), normed, layer, output, out),
                _ => linears.forward(normed, layer, out),
            }
        };
        for layer in 0..LAYERS {
            let [qkv, o, gate_up, down] = std::array::from_fn(|shape| &model.layers[shape][layer]);
            product(qkv, LinearOutput::Bf16, out.range(0..m * 6144))?;
            linears.forward(out.range(0..m * 4096), o, delta)?;
            if linears.fuses_glu(m, gate_up, Activation::Silu) {
                product(
                    gate_up,
                    LinearOutput::Glu(Activation::Silu),
                    out.range(0..m * 14336),
                )?;
            } else {
                product(gate_up, LinearOutput::Bf16, out.range(0..m * 28672))?;
            }
            linears.forward(out.range(0..m * 14336), down, delta)?;
        }
        let logits = model.out.slice::<f32>().range(0..m * 128_256);
        linears.forward_f32(delta, &model.layers[4][0], logits)
    }
}

/// Measures for so many rows as at start, and prints what was chosen.
pub(crate) fn measure(linears: &mut Linears, model: &Model, rows: &[usize]) {
    let start = Instant::now();
    let layers: Vec<Vec<&GpuLinear>> = model
        .layers
        .iter()
        .map(|layers| layers.iter().collect())
        .collect();
    let uses: Vec<_> = layers
        .iter()
        .zip(SHAPES)
        .map(|(layers, (name, ..))| match name {
            "gate_up" => (layers, LinearOutput::Glu(Activation::Silu)),
            "lm_head" => (layers, LinearOutput::F32),
            _ => (layers, LinearOutput::Bf16),
        })
        .map(|(layers, output)| LinearUse { layers, output, rows })
        .collect();
    let scratch = LinearScratch {
        x: model.x.slice(),
        out: model.out.slice(),
        weights: model.x.slice().range(0..0),
    };
    linears.measure(&uses, scratch).expect("measurements");
    println!("measured in {:.0} ms", start.elapsed().as_secs_f64() * 1e3);
    for choice in linears.choices() {
        println!("{choice}");
    }
}

fn time_chain(gpu: &Gpu, linears: &Linears, model: &Model, name: &str) {
    print!("{name:14}");
    for m in [1, 2, 4, 8, 16, 24, 32, 64, 128, 256] {
        let shapes = SHAPES.iter().zip(&model.layers);
        let floor: f64 = shapes
            .map(|((_, n, k), layers)| floor_us(m, *n, *k) * layers.len() as f64)
            .sum();
        let us = time_us(gpu, 1, |_| chain(linears, model, m));
        print!("  m {m}: {:.3} {:.1}%", us / 1e3, 100.0 * floor / us);
    }
    println!();
}

pub(crate) fn floor_us(m: usize, n: usize, k: usize) -> f64 {
    let bytes = 2 * (n * k + m * k + m * n);
    let operations = 2 * m * n * k;
    1e6 * (bytes as f64 / READ_BANDWIDTH).max(operations as f64 / BF16_RATE)
}

fn time_layer(gpu: &Gpu, linears: &Linears, model: &Model, shape: usize, m: usize) -> f64 {
    let layers = &model.layers[shape];
    let calls = if layers.len() == 1 { 4 } else { 2 * layers.len() };
    time_us(gpu, calls, |call| {
        let layer = &layers[call % layers.len()];
        let x = model.x.slice().range(0..m * layer.inputs());
        let len = m * layer.outputs();
        if layers.len() == 1 {
            linears.forward_f32(x, layer, model.out.slice().range(0..len))
        } else {
            linears.forward(x, layer, model.out.slice().range(0..len))
        }
    })
}

/// All products of a decode step, each reading what the one before wrote.
fn chain(linears: &Linears, model: &Model, m: usize) -> Result<(), GpuError> {
    let x = model.x.slice::<bf16>();
    let out = model.out.slice::<bf16>();
    for layer in 0..LAYERS {
        let [qkv, o, gate_up, down] = std::array::from_fn(|shape| &model.layers[shape][layer]);
        linears.forward(x.range(0..m * 4096), qkv, out.range(0..m * 6144))?;
        linears.forward(out.range(0..m * 4096), o, x.range(0..m * 4096))?;
        if linears.fuses_glu(m, gate_up, Activation::Silu) {
            let activated = out.range(0..m * 14336);
            let (room, output) = (LinearRoom::default(), LinearOutput::Glu(Activation::Silu));
            linears.forward_in(room, x.range(0..m * 4096), gate_up, output, activated)?;
        } else {
            linears.forward(x.range(0..m * 4096), gate_up, out.range(0..m * 28672))?;
        }
        linears.forward(out.range(0..m * 14336), down, x.range(0..m * 4096))?;
    }
    let logits = model.out.slice::<f32>().range(0..m * 128_256);
    linears.forward_f32(x.range(0..m * 4096), &model.layers[4][0], logits)
}
