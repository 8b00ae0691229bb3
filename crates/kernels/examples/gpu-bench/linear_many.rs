//! Products of 65 to 512 rows of Llama-3.1-8B's shape: every tile of the kernels for Hopper beside cuBLASLt.

use plimsoll_core::Component;
use plimsoll_device::cuda::{Gpu, GpuError};
use plimsoll_kernels::Activation;
use plimsoll_kernels::cuda::{
    FusedKernels, GpuLinear, GpuValues, LinearOutput, LinearPath, LinearRoom, LinearTile, Linears,
};

use crate::common::time_us;
use crate::linear::{Model, SHAPES, floor_us, measure};

const ROWS: [usize; 6] = [96, 128, 192, 256, 384, 512];

pub(crate) fn bench(gpu: &Gpu) {
    let workspace = gpu
        .alloc(Component::Runtime, Linears::WORKSPACE_BYTES)
        .expect("room");
    let mut linears = Linears::load(gpu, workspace).expect("cuBLASLt and kernels");
    let fused = FusedKernels::load(gpu).expect("kernels");
    let model = Model::new(gpu, GpuValues::Bf16);
    println!("us (TFLOP/s); tiles: rows of x times rows of weights, the fastest first");
    println!("gated: silu(gate) * up, for cuBLASLt by a kernel of its own");
    let gated = LinearOutput::Glu(Activation::Silu);
    let cases = [0, 1, 2, 3].map(|shape| (shape, LinearOutput::Bf16));
    for (shape, output) in cases.into_iter().chain([(2, gated)]) {
        let ((name, n, k), layers) = (SHAPES[shape], &model.layers[shape]);
        let kind = if output == gated { "gated" } else { "" };
        for m in ROWS {
            let rate = |us: f64| 2.0 * (m * n * k) as f64 / us * 1e-6;
            let x = model.x.slice().range(0..m * k);
            let (out, activated) = (m * n, m * n / 2);
            let (sums, activated) = (
                model.out.slice().range(0..out),
                model.out.slice().range(out..out + activated),
            );
            let product = |linears: &Linears, layer: &GpuLinear| -> Result<(), GpuError> {
                if output != gated {
                    return linears.forward(x, layer, sums);
                }
                if linears.fuses_glu(m, layer, Activation::Silu) {
                    return linears.forward_in(LinearRoom::default(), x, layer, gated, activated);
                }
                linears.forward(x, layer, sums)?;
                fused.glu(Activation::Silu, sums, n / 2, activated)
            };
            let time = |linears: &Linears| time_us(gpu, layers.len(), |call| product(linears, &layers[call]));
            linears.fix(Some(LinearPath::CublasLt));
            let library = time(&linears);
            let mut times = Vec::new();
            for &tile in LinearTile::all(GpuValues::Bf16) {
                linears.fix(Some(LinearPath::Many(tile)));
                if linears.is_own(m, &layers[0], output) {
                    times.push((tile, time(&linears)));
                }
            }
            times.sort_by(|(_, a), (_, b)| a.total_cmp(b));
            let floor = floor_us(m, n, k);
            print!(
                "{name:8} {kind:5} {m:4} floor {floor:6.1} cuBLASLt {library:6.1} ({:.0})",
                rate(library)
            );
            for (tile, us) in times {
                print!(" {tile} {us:.1} ({:.0})", rate(us));
            }
            println!();
        }
    }
    linears.fix(None);
    measure(&mut linears, &model, &ROWS);
}
