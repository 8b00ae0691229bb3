//! What becomes of stored experts, of integers of four bits and of GGUF's block types, without a GPU.

use std::path::Path;
use std::sync::Arc;

use half::bf16;
use plimsoll_device::cast_slice_mut;
use plimsoll_kernels::{GgufFormat, WeightType};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::convert::{Job, widen_int4, widen_mxfp4};
use super::layout::tests::random_spec;
use super::layout::{Element, KeptScales, Layout, LinearSpan, Part, Places, Span, Stored};
use crate::blocks::{Among, Decoder, InExperts, Layer, Matrix, RowOrder};
use crate::model::Description;
use crate::quantization::{GgufTypes, Int4Groups, Quantization};
use crate::shard::Axis;
use crate::spec::LayerSpec;
use crate::weights::int4_tests::{self, Plain};
use crate::weights::{Checked, Scales, Source, Tensor};
use crate::{DecoderSpec, LoadFormat, ModelError, ServeAs, Shape, Shard};

/// Into host memory, some rows at a time.
fn fill(part: &Part, tensors: &mut Checked<'_>, memory: &mut [u8]) {
    let job = Job::new(tensors, part).unwrap();
    let mut scales = Vec::new();
    let step = 7_usize.next_multiple_of(part.element.rows_together());
    for first in (0..part.rows()).step_by(step) {
        let rows = first..part.rows().min(first + step);
        let (elements, places) = part.spans(rows.clone());
        scales.clear();
        job.write_rows(rows, &mut memory[elements.range()], &mut scales)
            .unwrap();
        if let Some(places) = places {
            cast_slice_mut(&mut memory[places.range()]).copy_from_slice(&scales);
        }
    }
}

/// One by one, stacked, transposed, by turns, in 16, 8 and 4 bits: as the CPU reads them.
#[test]
fn experts_arrive_as_a_cpu_reads_them() {
    for name in [
        "mixtral",
        "qwen2-moe",
        "qwen3-moe",
        "qwen3-moe-awq",
        "qwen3-moe-fp8-block",
        "gpt-oss",
        "gpt-oss-mxfp4",
    ] {
        let matrices = arrives(name, Shard::WHOLE).unwrap();
        let experts = matrices.iter().filter(|matrix| matrix.expert.is_some());
        assert!(experts.count() >= 18, "{name}");
    }
}

/// The same of the parts of ranks, of all formats that can be divided in so small models: rows, columns, stacked pieces.
#[test]
fn parts_of_ranks_arrive_as_a_cpu_reads_them() {
    for (name, counts) in [
        ("llama3-tied-bf16", &[2][..]),
        ("qwen2", &[2, 4]),
        ("qwen3-f16", &[2]),
        ("phi3-longrope", &[2]),
        ("gemma4-moe", &[2, 4]),
        ("llama-fp8-channel", &[2, 4]),
        ("phi3-fp8-tensor", &[2]),
        ("phi3-int4-channel", &[2]),
        ("llama-gptq", &[2]),
        ("qwen3-next-moe", &[2]),
        ("mixtral", &[2, 4]),
        ("qwen3-moe", &[2, 4]),
        ("qwen3-moe-awq", &[2]),
        ("gpt-oss", &[2, 4]),
    ] {
        for &ranks in counts {
            for rank in 0..ranks {
                let matrices = arrives(name, Shard { rank, ranks }).unwrap();
                let divided = matrices.iter().filter_map(|matrix| matrix.share.as_ref());
                let (rows, columns): (Vec<_>, Vec<_>) =
                    divided.partition(|share| share.axis == Axis::Outputs);
                assert!(rows.len() > 1 && columns.len() > 1, "{name}");
            }
        }
    }
}

/// Loads what a rank has of a golden model into host memory, compares matrices that are not in four bits of integers with what a CPU
/// reads, and returns them.
fn arrives(name: &str, shard: Shard) -> Result<Vec<Matrix>, ModelError> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden")
        .join(name);
    let description = Description::read(&path, &ServeAs::default())?;
    let source = description.source(LoadFormat::Auto)?;
    let spec = description.about.spec().shard(shard)?;
    let layout = Layout::new(&spec, None).unwrap();
    let mut tensors = Checked::new(&*source);
    let mut aligned = vec![u64::MAX; layout.bytes / 8];
    let memory: &mut [u8] = cast_slice_mut(&mut aligned);
    for part in &layout.parts {
        fill(part, &mut tensors, memory);
    }
    let mut matrices = Vec::new();
    for part in &layout.parts {
        let Stored::Matrix(matrix) = &part.stored else {
            continue;
        };
        matrices.push(matrix.clone());
        let cpu = Checked::new(&*source).matrix(matrix)?.dequantised()?;
        let cpu = cpu.matrix()?;
        let place = part.scales;
        let kept = part.kept();
        let words: Option<Vec<f32>> = place.map(|place| {
            let span = place.span(0..part.rows());
            place.without_padding(cast_slice_mut(&mut memory[span.range()]))
        });
        let found = &mut memory[part.span().range()];
        let of_four_bits: Option<Vec<Vec<f32>>> = match (part.element, &words, kept) {
            (Element::Int4 | Element::ExpertInt4, Some(words), Some(KeptScales::Int4(group))) => {
                let words: Vec<u32> = words.iter().map(|word| word.to_bits()).collect();
                Some(widen_int4(part.element, found, &words, group, matrix.inputs))
            }
            (Element::Mxfp4, ..) => Some(widen_mxfp4(found, matrix.inputs)),
            _ => None,
        };
        let mut wide = vec![0.0; matrix.inputs];
        for (row, bytes) in found.chunks_exact_mut(part.row_bytes()).enumerate() {
            cpu.widen_row(row, &mut wide);
            let found: Vec<f32> = match (part.element, &words, kept) {
                (Element::Mxfp4 | Element::Int4 | Element::ExpertInt4, ..) => {
                    let rows = of_four_bits.as_ref().expect("they have exponents or groups");
                    rows[row].iter().map(|&x| bf16::from_f32(x).to_f32()).collect()
                }
                (Element::Fp8, Some(scales), Some(KeptScales::Fp8(kept))) => {
                    Scales::new(scales.clone(), kept, matrix)
                        .widen(row, bytes)
                        .map(|x| bf16::from_f32(x).to_f32())
                        .collect()
                }
                _ => {
                    // As the GPU has it.
                    wide.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
                    let narrow = cast_slice_mut::<_, bf16>(bytes);
                    narrow.iter().map(|x| x.to_f32()).collect()
                }
            };
            assert_eq!(found, wide, "{name}: {} of {shard:?}, row {row}", part.name());
        }
    }
    Ok(matrices)
}

/// Projections of layers that share keys and values, which published checkpoints have and nobody reads.
#[test]
fn what_nothing_reads_may_be_stored() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/gemma4-shared");
    let description = Description::read(&path, &ServeAs::default()).unwrap();
    let spec = description.about.spec();
    let layout = Layout::new(spec, None).unwrap();
    let shares = |layer: &Arc<LayerSpec>| layer.attention().is_some_and(|own| own.shares_kv.is_some());
    let layers = spec.layers.iter().enumerate().filter(|(_, layer)| shares(layer));
    let names: Vec<_> = layers
        .flat_map(|(index, _)| {
            ["k_proj", "v_proj", "k_norm", "v_norm"]
                .map(|part| format!("model.layers.{index}.self_attn.{part}.weight"))
        })
        .collect();
    assert!(!names.is_empty());
    assert_eq!(layout.idle, names);
}

/// Every layout becomes the kernels' own, to the bit, in pieces of any rows, and in the order of groups.
#[test]
fn integers_of_four_bits_keep_their_values() {
    for (seed, format) in (0..).zip(int4_tests::formats()) {
        let mut rng = StdRng::seed_from_u64(seed);
        let (outputs, inputs) = (8 * rng.random_range(1..20), 8 * rng.random_range(1..50));
        let plain = Plain::random(format, outputs, inputs, &mut rng);
        let tensors = plain.tensors();
        let parts = [1, 3, 0, 4].map(|part| part * outputs / 8);
        let elements = [Element::Int4, Element::ExpertInt4].into_iter();
        let grouped = RowOrder::Grouped { groups: 1, parts };
        for (element, order) in
            elements.flat_map(|element| [RowOrder::Plain, grouped].map(|order| (element, order)))
        {
            let place = Span {
                start: 0,
                len: inputs * size_of::<u32>(),
            };
            let part = Part {
                stored: Stored::Matrix(plain.matrix(order)),
                element,
                start: 0,
                scales: None,
                order: format.ordered.then_some(place),
            };
            let Some(KeptScales::Int4(group)) = part.kept() else {
                panic!("{format:?} has no groups")
            };
            let job = Job::new(&mut Checked::new(&tensors), &part).unwrap();
            let same: Vec<u32> = (0..inputs as u32).collect();
            let input_of = job.order().unwrap_or(&same);
            let together = element.rows_together();
            let step = together * rng.random_range(1..=outputs / together);
            for first in (0..outputs).step_by(step) {
                let rows = first..outputs.min(first + step);
                let mut aligned = vec![u32::MAX; rows.len() * part.row_bytes() / 4];
                let codes: &mut [u8] = cast_slice_mut(&mut aligned);
                let mut words = Vec::new();
                job.write_rows(rows.clone(), codes, &mut words).unwrap();
                let words: Vec<u32> = words.into_iter().map(f32::to_bits).collect();
                assert_eq!(words.len(), rows.len() * group.stride(inputs));
                let places = match element {
                    Element::ExpertInt4 => 2 * part.row_bytes(),
                    _ => inputs,
                };
                for (row, mut found) in rows.zip(widen_int4(element, codes, &words, group, places)) {
                    // Kernels multiply what is past the end by inputs of 0; their tests on a GPU have any codes there.
                    let padding = found.split_off(inputs);
                    assert!(
                        padding.iter().all(|x| x.is_finite()),
                        "{format:?}, row {row}: {padding:?}"
                    );
                    let of = |&input: &u32| plain.element(order.stored(row), input as usize);
                    let want: Vec<f32> = input_of.iter().map(of).collect();
                    assert_eq!(found, want, "{format:?}, {order:?}, row {row}");
                }
            }
        }
    }
}

/// What goes to experts is never put into another order.
#[test]
fn experts_have_their_inputs_in_order() {
    let formats =
        int4_tests::formats().filter(|format| format.ordered && format.groups != Int4Groups::Channel);
    for (seed, format) in (0..).zip(formats) {
        let plain = Plain::random(format, 16, 256, &mut StdRng::seed_from_u64(seed));
        let tensors = plain.tensors();
        let matrix = Matrix {
            expert: Some(InExperts {
                stacked: "experts".to_owned(),
                index: 0,
                count: 1,
                rows: Among {
                    first: 0,
                    step: 1,
                    all: 16,
                },
                transposed: false,
            }),
            ..plain.matrix(RowOrder::Plain)
        };
        let place = Places::default()
            .put_matrices(std::slice::from_ref(&matrix))
            .ok()
            .unwrap();
        assert_eq!((place.element, place.order), (Element::ExpertInt4, None));
        let part = Part {
            stored: Stored::Matrix(matrix),
            element: place.element,
            start: 0,
            scales: None,
            order: None,
        };
        let error = Job::new(&mut Checked::new(&tensors), &part)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("mlp.up_proj") && error.contains("which experts cannot have on a GPU"),
            "{format:?}: {error}"
        );
    }
}

/// A file whose matrices are in these types by turns, of random blocks, and whose heads' rows are interleaved.
struct Blocks(Vec<WeightType>);

impl Blocks {
    fn dtype(&self, module: &str) -> WeightType {
        let sum: usize = module.bytes().map(usize::from).sum();
        self.0[sum % self.0.len()]
    }

    /// For each matrix of the decoder.
    fn types(&self, layout: &Layout) -> GgufTypes {
        let matrices = layout.parts.iter().filter_map(|part| match &part.stored {
            Stored::Matrix(matrix) => Some(matrix.module.clone()),
            Stored::Vector(_) => None,
        });
        let types = matrices.map(|module| (self.dtype(&module), module));
        let of_blocks = types.filter(|(dtype, _)| dtype.block_len() > 1);
        GgufTypes::new(of_blocks.map(|(dtype, module)| (module, dtype)).collect())
    }
}

impl Source for Blocks {
    fn has(&self, _: &str) -> bool {
        true
    }

    fn tensor(&self, name: &str, expected: &[usize]) -> Result<Option<Tensor<'_>>, ModelError> {
        let mut rng = StdRng::seed_from_u64(name.bytes().map(u64::from).sum());
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let (dtype, order) = match expected {
            [_] => (WeightType::F32, RowOrder::Plain),
            [rows, _] if module.ends_with("q_proj") => {
                (self.dtype(module), RowOrder::Interleaved { head_dim: rows / 4 })
            }
            _ => (self.dtype(module), RowOrder::Plain),
        };
        let blocks = expected.iter().product::<usize>() / dtype.block_len();
        let mut data: Vec<u8> = (0..blocks * dtype.block_bytes()).map(|_| rng.random()).collect();
        // Where blocks have floats, of small numbers.
        let floats: &[usize] = match dtype {
            WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 | WeightType::F16 | WeightType::Bf16 => {
                &[0]
            }
            WeightType::Q6K => &[208],
            WeightType::Q2K => &[80, 82],
            WeightType::F32 => &[2],
            _ => &[0, 2],
        };
        for block in data.chunks_exact_mut(dtype.block_bytes()) {
            floats
                .iter()
                .for_each(|&at| block[at + 1] = block[at + 1] & 0x83 | 0x20);
        }
        Ok(Some(Tensor {
            name: name.to_owned(),
            dtype,
            shape: Shape(expected.to_vec()),
            order,
            unit_offset: false,
            data: data.into(),
        }))
    }

    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    fn total_bytes(&self) -> u64 {
        0
    }
}

/// Of heads and sizes of which rows are whole blocks.
fn spec_of_blocks(seed: u64) -> DecoderSpec {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut spec = random_spec(&mut rng);
    spec.hidden_size = 256 * rng.random_range(1..4);
    for layer in &mut spec.layers {
        let layer = Arc::make_mut(layer);
        layer.dense_mlp_mut().intermediate_size = 256 * rng.random_range(1..4);
        let attention = layer.attention_mut();
        (attention.heads, attention.kv_heads, attention.head_dim) = (4, 2, 64);
    }
    spec.quantization = Quantization::default();
    spec
}

/// Each type by itself, and several in a file, which the matrices of a stack may have too: to the bit what the file says, or that
/// rounded to `bf16`.
#[test]
fn block_types_keep_their_values() {
    let kept = GgufFormat::ALL.map(GgufFormat::dtype);
    let others = [
        WeightType::Q2K,
        WeightType::F32,
        WeightType::F16,
        WeightType::Bf16,
    ];
    let mut files: Vec<Vec<WeightType>> = kept.iter().chain(&others).map(|&dtype| vec![dtype]).collect();
    files.push(vec![WeightType::Q4K, WeightType::Q6K]);
    files.push(vec![WeightType::Q5_0, WeightType::Q8_0, WeightType::Q2K]);
    for (seed, types) in (0..).zip(files) {
        let source = Blocks(types.clone());
        let mut spec = spec_of_blocks(seed);
        spec.quantization = Quantization::of_gguf(source.types(&Layout::new(&spec, None).unwrap()));
        let layout = Layout::new(&spec, None).unwrap();
        let mut aligned = vec![u64::MAX; layout.bytes / 8];
        let memory: &mut [u8] = cast_slice_mut(&mut aligned);
        let mut tensors = Checked::new(&source);
        for part in &layout.parts {
            fill(part, &mut tensors, memory);
        }
        for part in &layout.parts {
            let Stored::Matrix(matrix) = &part.stored else {
                continue;
            };
            let dtype = source.dtype(&matrix.module);
            let format = GgufFormat::of(dtype);
            assert_eq!(
                part.element,
                format.map_or(Element::Bf16, Element::Gguf),
                "{types:?}"
            );
            let stored = Checked::new(&source).matrix(matrix).unwrap().tensor.in_order();
            let stored = stored.matrix().unwrap();
            let mut want = vec![0.0; matrix.inputs];
            let rows = memory[part.span().range()].chunks_exact_mut(part.row_bytes());
            for (row, bytes) in rows.enumerate() {
                stored.widen_row(row, &mut want);
                let mut found = vec![f32::NAN; matrix.inputs];
                match format {
                    Some(format) => format.unpack_row(bytes, &mut found),
                    None => {
                        want.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
                        let narrow = cast_slice_mut::<_, bf16>(bytes);
                        found.iter_mut().zip(narrow).for_each(|(to, x)| *to = x.to_f32());
                    }
                }
                assert_eq!(found, want, "{types:?}: {} row {row}", part.name());
            }
        }
    }
}

/// One after the other: as many pieces as neighbours differ.
#[test]
fn parts_in_different_types_are_pieces() {
    let source = Blocks(vec![WeightType::Q4K, WeightType::Q6K, WeightType::Q2K]);
    let mut spec = spec_of_blocks(3);
    spec.quantization = Quantization::of_gguf(source.types(&Layout::new(&spec, None).unwrap()));
    let mut places = Places::default();
    let decoder = Decoder::visit(&spec, &mut places).ok().unwrap();
    let mut counts = Vec::new();
    for layer in &decoder.layers {
        let qkv = layer.mixer.projections();
        let outputs: usize = qkv.pieces.iter().map(|piece| piece.outputs).sum();
        assert_eq!(outputs, (4 + 2 * 2) * 64);
        let neighbours = qkv.pieces.windows(2);
        assert!(
            neighbours
                .into_iter()
                .all(|pair| pair[0].element != pair[1].element)
        );
        counts.push(qkv.pieces.len());
    }
    assert!(counts.iter().any(|&count| count > 1), "{counts:?}");
    // Of a stack of one type there is one.
    spec.quantization = Quantization::default();
    let decoder = Decoder::visit(&spec, &mut Places::default()).ok().unwrap();
    let qkv = |layer: &Layer<LinearSpan, Span>| layer.mixer.projections().pieces.len();
    assert!(decoder.layers.iter().all(|layer| qkv(layer) == 1));
}

/// A matrix that the file's header does not call by its type any more is an error that names it.
#[test]
fn types_that_changed_are_errors() {
    let mut spec = spec_of_blocks(5);
    let before = Blocks(vec![WeightType::Q4K]);
    spec.quantization = Quantization::of_gguf(before.types(&Layout::new(&spec, None).unwrap()));
    let layout = Layout::new(&spec, None).unwrap();
    let is_matrix = |part: &&Part| matches!(part.stored, Stored::Matrix(_));
    let part = layout.parts.iter().find(is_matrix).unwrap();
    let after = Blocks(vec![WeightType::Q5K]);
    let error = Job::new(&mut Checked::new(&after), part).unwrap_err().to_string();
    assert!(
        error.contains(&part.name()) && error.contains("Q4_K") && error.contains("Q5_K"),
        "{error}"
    );
}
