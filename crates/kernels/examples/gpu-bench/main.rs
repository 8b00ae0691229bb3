//! Microbenchmarks of the GPU kernels against the floor: `gpu-bench [OP...]`, all by default.

#![allow(clippy::print_stdout, reason = "tables for the terminal")]

mod all_reduce;
mod attention_decode;
mod attention_prefill;
mod common;
mod delta_rule;
mod encoder;
mod fused;
mod linear;
mod linear_many;
mod moe;
mod moe_chain;
mod sample;

type Bench = fn(&plimsoll_device::cuda::Gpu);

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let gpu = plimsoll_device::cuda::Gpu::open(0).expect("an NVIDIA GPU");
    // One entry per operation: name and benchmark.
    let all: &[(&str, Bench)] = &[
        ("all_reduce", all_reduce::bench),
        ("attention_decode", attention_decode::bench),
        ("attention_prefill", attention_prefill::bench),
        ("delta_rule", delta_rule::bench),
        ("encoder", encoder::bench),
        ("fused", fused::bench),
        ("linear", linear::bench),
        ("linear_int4", linear::bench_int4),
        ("linear_many", linear_many::bench),
        ("moe", moe::bench),
        ("moe_chain", moe_chain::bench),
        ("sample", sample::bench),
    ];
    for &(name, bench) in all {
        if wanted.is_empty() || wanted.iter().any(|w| w == name) {
            println!("== {name}");
            bench(&gpu);
        }
    }
}
