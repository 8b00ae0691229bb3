use super::*;
use crate::Activation;
use crate::cuda::AssumedGpu;

const GLU: LinearOutput = LinearOutput::Glu(Activation::Silu);

/// Outputs and inputs of the projections of Llama-3.1-8B, Qwen2.5-0.5B and Qwen2.5-32B, and of the first two heads.
const LAYERS: [(usize, usize, LinearOutput); 14] = [
    (6144, 4096, LinearOutput::Bf16),
    (4096, 4096, LinearOutput::Bf16),
    (14336, 4096, GLU),
    (4096, 14336, LinearOutput::Bf16),
    (128_256, 4096, LinearOutput::F32),
    (1152, 896, LinearOutput::Bf16),
    (896, 896, LinearOutput::Bf16),
    (4864, 896, GLU),
    (896, 4864, LinearOutput::Bf16),
    (151_936, 896, LinearOutput::F32),
    (7168, 5120, LinearOutput::Bf16),
    (5120, 5120, LinearOutput::Bf16),
    (27648, 5120, GLU),
    (5120, 27648, LinearOutput::Bf16),
];

impl From<AssumedGpu> for Cuts {
    fn from(gpu: AssumedGpu) -> Self {
        let sm_count = gpu.sm_count;
        Self {
            sm_count,
            most_shared: gpu.most_shared(),
            clusters: match gpu.compute_capability >= (9, 0) {
                true => [1, 2, 4, 8].map(|blocks| sm_count / blocks),
                false => [sm_count, 0, 0, 0],
            },
        }
    }
}

fn all_values() -> impl Iterator<Item = GpuValues> {
    let int4 = [Int4Group::Of32, Int4Group::Of64, Int4Group::Of128].map(GpuValues::Int4);
    let fp8 = [Fp8Scaling::Rows, Fp8Scaling::Blocks].map(GpuValues::Fp8);
    let gguf = GgufFormat::ALL.map(GpuValues::Gguf);
    [GpuValues::Bf16].into_iter().chain(fp8).chain(int4).chain(gguf)
}

fn shape(m: usize, (n, k, output): (usize, usize, LinearOutput), values: GpuValues) -> Shape {
    Shape {
        m,
        n,
        k,
        wide: output == LinearOutput::F32,
        bias: false,
        values,
        pitch: n,
    }
}

/// Every GPU streams the weights of as many rows as one launch takes there, if they can be streamed at all, and its blocks have the shared
/// memory they ask for.
#[test]
fn few_rows_are_streamed_on_every_gpu() {
    let h200 = Cuts::from(AssumedGpu::H200);
    for gpu in AssumedGpu::EACH {
        let cuts = Cuts::from(gpu);
        for values in all_values() {
            for layer in LAYERS {
                for m in 1..=cuts.most_rows(values) {
                    let (shape, output) = (shape(m, layer, values), layer.2);
                    let found = cuts.of(&shape, output);
                    // Chunks of a row are whole, or all of x fits.
                    let is_int4 = matches!(values, GpuValues::Int4(_));
                    let is_cut = chunks(&shape).is_some() || is_int4 && m <= FEW_ROWS;
                    assert_eq!(!found.is_empty(), is_cut, "{shape:?} on {gpu:?}");
                    assert_eq!(!h200.of(&shape, output).is_empty(), is_cut, "{shape:?}");
                    for cut in found {
                        let shared = cuts.launched_bytes(&shape, output, cut);
                        assert!(
                            gpu.blocks(shared) >= cut.blocks_per_sm,
                            "{shape:?}, {cut} on {gpu:?}"
                        );
                    }
                }
            }
        }
    }
}

/// Where a block may have more than 99 KiB, there is all the room for x in every cut; where it may not, enough for 8 rows or 16.
#[test]
fn inputs_have_the_room_that_is_left() {
    let room = |cuts: Cuts, m, values| cuts.input_bytes(&shape(m, LAYERS[0], values), LinearCut::WIDEST);
    for gpu in AssumedGpu::EACH {
        let cuts = Cuts::from(gpu);
        if gpu.most_shared() > 99 << 10 {
            for values in all_values() {
                assert_eq!(cuts.most_rows(values), most_rows(values), "{values:?} on {gpu:?}");
                for m in 1..=most_rows(values) {
                    for (row_warps, cluster) in LinearCut::SIZES {
                        for blocks_per_sm in [1, 2] {
                            let cut = LinearCut {
                                row_warps,
                                cluster,
                                blocks_per_sm,
                            };
                            let bytes = cuts.input_bytes(&shape(m, LAYERS[0], values), cut);
                            assert_eq!(bytes, INPUT_BYTES, "{m} rows of {values:?}, {cut} on {gpu:?}");
                        }
                    }
                }
            }
            continue;
        }
        let int4 = GpuValues::Int4(Int4Group::Of128);
        let fp8 = GpuValues::Fp8(Fp8Scaling::Blocks);
        assert_eq!(
            [GpuValues::Bf16, fp8, int4].map(|values| cuts.most_rows(values)),
            [16, 16, 8]
        );
        // Besides 64 KiB of weights and 8.25 or 16.5 KiB of sums.
        assert_eq!(room(cuts, 1, GpuValues::Bf16), 26 << 10);
        assert_eq!(room(cuts, 16, GpuValues::Bf16), 18 << 10);
    }
}
