//! Sums over GPUs, alone and with the norm behind them, against NCCL, for as many of 2, 4 and 8 GPUs as there are.

use std::thread;

use half::bf16;
use plimsoll_core::Component;
use plimsoll_device::cuda::{DeviceError, Gpu, GpuError};
use plimsoll_kernels::cuda::{AllReduce, AllReducePath, FusedKernels, GpuNorm};

use crate::common::time_replays_us;

const ROWS: [usize; 6] = [1, 16, 64, 512, 2048, 8192];
const WIDTHS: [usize; 2] = [4096, 8192];

/// What is timed.
#[derive(Clone, Copy)]
enum Op {
    Sum,
    /// With the norm.
    Norm,
    /// The norm by a kernel of its own.
    SumThenNorm,
}

/// Median microseconds of a call on the slowest rank.
fn time(group: &mut [AllReduce], gpus: &[Gpu], op: Op, rows: usize, width: usize) -> f64 {
    let calls = if rows > 1000 { 10 } else { 50 };
    thread::scope(|scope| {
        let ranks = group.iter_mut().zip(gpus).map(|(rank, gpu)| {
            scope.spawn(move || {
                let fused = FusedKernels::load(gpu).expect("kernels");
                let [hidden, delta, out] = [0; 3].map(|_| {
                    let slab = gpu
                        .alloc(Component::Arena, rows * width * size_of::<bf16>())
                        .expect("room on the GPU");
                    gpu.fill(slab.slice(), 0).expect("a fill");
                    slab
                });
                let weight = gpu
                    .alloc(Component::Arena, width * size_of::<f32>())
                    .expect("room on the GPU");
                gpu.fill(weight.slice(), 0).expect("a fill");
                let norm = GpuNorm {
                    weight: weight.slice(),
                    eps: 1e-5,
                };
                let us = time_replays_us(gpu, calls, true, |_| match op {
                    Op::Sum => rank.sum(delta.slice()),
                    Op::Norm => rank.add_rms_norm(&fused, hidden.slice(), delta.slice(), norm, out.slice()),
                    Op::SumThenNorm => {
                        rank.sum(delta.slice())?;
                        fused.add_rms_norm(hidden.slice(), delta.slice(), norm, out.slice())
                    }
                });
                rank.check().expect("all ranks came");
                us
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("a rank"))
            .fold(0.0, f64::max)
    })
}

pub(crate) fn bench(first: &Gpu) {
    let mut gpus = vec![first.clone()];
    while let Ok(gpu) = Gpu::open(gpus.len()) {
        gpus.push(gpu);
    }
    let counts: Vec<usize> = [2, 4, 8].into_iter().filter(|&n| n <= gpus.len()).collect();
    if counts.is_empty() {
        println!("needs two GPUs");
    }
    for ranks in counts {
        let gpus = &gpus[..ranks];
        let mut ours = AllReduce::group(gpus, AllReducePath::Peers).expect("a group");
        println!("{ranks} GPUs\n{}", ours[0].report());
        let mut nccl = match AllReduce::group(gpus, AllReducePath::Nccl) {
            Ok(nccl) => Some(nccl),
            Err(DeviceError::Gpu(GpuError::NoLibrary { library })) => {
                println!("without {library}");
                None
            }
            Err(error) => panic!("{error}"),
        };
        println!(
            "{:>6} {:>6} {:>9} {:>9} {:>9} {:>9}  us; GB/s of each link by sum",
            "rows", "width", "sum", "with norm", "then norm", "NCCL"
        );
        for (width, rows) in WIDTHS
            .into_iter()
            .flat_map(|width| ROWS.map(|rows| (width, rows)))
        {
            let [sum, norm, then] =
                [Op::Sum, Op::Norm, Op::SumThenNorm].map(|op| time(&mut ours, gpus, op, rows, width));
            let nccl = nccl
                .as_mut()
                .map_or(f64::NAN, |nccl| time(nccl, gpus, Op::Sum, rows, width));
            let bytes = 2.0 * (ranks - 1) as f64 / ranks as f64 * (rows * width * 2) as f64;
            println!(
                "{rows:6} {width:6} {sum:9.2} {norm:9.2} {then:9.2} {nccl:9.2}  {:6.1}",
                bytes / sum / 1e3
            );
        }
    }
}
