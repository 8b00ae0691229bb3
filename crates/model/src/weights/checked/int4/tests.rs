use std::collections::BTreeMap;

use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::blocks::{RowOrder, StoredAs};
use crate::quantization::{Int4Groups, MatrixFormat};
use crate::weights::Source;

const MODULE: &str = "model.layers.0.mlp.up_proj";

/// A matrix in plain words, packed by the published definitions: a word is the sum of codes times powers of 16.
pub(crate) struct Plain {
    pub(crate) format: Int4Format,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    /// `[outputs][inputs]`.
    codes: Vec<Vec<u32>>,
    /// `[outputs][groups]`.
    zeros: Vec<Vec<u32>>,
    scales: Vec<Vec<f32>>,
    /// Of each input.
    order: Vec<usize>,
}

/// By their names.
pub(crate) struct Tensors(pub(crate) BTreeMap<String, (WeightType, Vec<usize>, Vec<u8>)>);

impl Source for Tensors {
    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    fn tensor(&self, name: &str, _: &[usize]) -> Result<Option<Tensor<'_>>, ModelError> {
        let stored = self.0.get(name);
        Ok(stored.map(|(dtype, shape, data)| Tensor::plain(name, *dtype, shape, data)))
    }

    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    fn total_bytes(&self) -> u64 {
        0
    }
}

/// Eight codes, the first in the lowest bits.
fn sum(codes: impl Iterator<Item = u32>) -> u32 {
    codes
        .zip(0..8)
        .map(|(code, place)| code * 16_u32.pow(place))
        .sum()
}

/// Of AWQ: which of eight outputs is where in a word.
const AWQ: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

impl Plain {
    pub(crate) fn random(format: Int4Format, outputs: usize, inputs: usize, rng: &mut StdRng) -> Self {
        let groups = format.groups.count(inputs);
        let size = format.groups.size(inputs);
        let mut order: Vec<usize> = (0..inputs).map(|input| input / size).collect();
        if format.ordered {
            for last in (1..inputs).rev() {
                order.swap(last, rng.random_range(0..=last));
            }
        }
        let has_zeros = format.packing != Int4Packing::Compressed { symmetric: true };
        let mut rows = |len: usize, fixed: Option<u32>| -> Vec<Vec<u32>> {
            let row = |_| {
                (0..len)
                    .map(|_| fixed.unwrap_or_else(|| rng.random_range(0..16)))
                    .collect()
            };
            (0..outputs).map(row).collect()
        };
        let codes = rows(inputs, None);
        let zeros = rows(groups, (!has_zeros).then_some(8));
        let scales = (0..outputs)
            .map(|_| {
                (0..groups)
                    .map(|_| f16::from_f32(rng.random_range(-0.1..0.1)).to_f32())
                    .collect()
            })
            .collect();
        Self {
            format,
            outputs,
            inputs,
            codes,
            zeros,
            scales,
            order,
        }
    }

    pub(crate) fn tensors(&self) -> Tensors {
        let mut tensors = BTreeMap::new();
        let mut add = |name: &str, dtype, shape: [usize; 2], data: Vec<u8>| {
            let shape = if shape[1] == 0 {
                vec![shape[0]]
            } else {
                shape.to_vec()
            };
            tensors.insert(format!("{MODULE}.{name}"), (dtype, shape, data));
        };
        let words = |shape: [usize; 2], word: &dyn Fn(usize, usize) -> u32| -> Vec<u8> {
            let places = (0..shape[0]).flat_map(|row| (0..shape[1]).map(move |col| (row, col)));
            places
                .flat_map(|(row, col)| word(row, col).to_le_bytes())
                .collect()
        };
        let halves = |shape: [usize; 2], scale: &dyn Fn(usize, usize) -> f32| -> Vec<u8> {
            let places = (0..shape[0]).flat_map(|row| (0..shape[1]).map(move |col| (row, col)));
            places
                .flat_map(|(row, col)| f16::from_f32(scale(row, col)).to_le_bytes())
                .collect()
        };
        let (n, k, g) = (self.outputs, self.inputs, self.format.groups.count(self.inputs));
        let (codes, zeros, scales) = (&self.codes, &self.zeros, &self.scales);
        // Outputs past the end of packed zeros are 0.
        let zero = |output: usize, group: usize| zeros.get(output).map_or(0, |zeros| zeros[group]);
        let index: Vec<u8> = self
            .order
            .iter()
            .flat_map(|&group| (group as u32).to_le_bytes())
            .collect();
        match self.format.packing {
            Int4Packing::Compressed { symmetric } => {
                let shape = [n, k / 8];
                let word = |row: usize, col: usize| sum((0..8).map(|i| codes[row][8 * col + i]));
                add("weight_packed", WeightType::I32, shape, words(shape, &word));
                let sizes = [n as i64, k as i64];
                add(
                    "weight_shape",
                    WeightType::I64,
                    [2, 0],
                    sizes.iter().flat_map(|size| size.to_le_bytes()).collect(),
                );
                add(
                    "weight_scale",
                    WeightType::F16,
                    [n, g],
                    halves([n, g], &|row, col| scales[row][col]),
                );
                if !symmetric {
                    let shape = [n.div_ceil(8), g];
                    let word = |row: usize, col: usize| sum((0..8).map(|i| zero(8 * row + i, col)));
                    add("weight_zero_point", WeightType::I32, shape, words(shape, &word));
                }
                if self.format.ordered {
                    add("weight_g_idx", WeightType::I32, [k, 0], index);
                }
            }
            Int4Packing::Awq => {
                let word = |row: usize, col: usize| sum(AWQ.map(|i| codes[8 * col + i][row]).into_iter());
                add("qweight", WeightType::I32, [k, n / 8], words([k, n / 8], &word));
                let word = |row: usize, col: usize| sum(AWQ.map(|i| zero(8 * col + i, row)).into_iter());
                add("qzeros", WeightType::I32, [g, n / 8], words([g, n / 8], &word));
                add(
                    "scales",
                    WeightType::F16,
                    [g, n],
                    halves([g, n], &|row, col| scales[col][row]),
                );
            }
            Int4Packing::Gptq { zeros_less_one } => {
                let word = |row: usize, col: usize| sum((0..8).map(|i| codes[col][8 * row + i]));
                add("qweight", WeightType::I32, [k / 8, n], words([k / 8, n], &word));
                let word = |row: usize, col: usize| {
                    let whole = sum((0..8).map(|i| zero(8 * col + i, row)));
                    if zeros_less_one {
                        whole.wrapping_sub(0x1111_1111)
                    } else {
                        whole
                    }
                };
                add("qzeros", WeightType::I32, [g, n / 8], words([g, n / 8], &word));
                add(
                    "scales",
                    WeightType::F16,
                    [g, n],
                    halves([g, n], &|row, col| scales[col][row]),
                );
                add("g_idx", WeightType::I32, [k, 0], index);
            }
        }
        Tensors(tensors)
    }

    pub(crate) fn matrix(&self, order: RowOrder) -> Matrix {
        Matrix {
            module: MODULE.to_owned(),
            outputs: self.outputs,
            inputs: self.inputs,
            format: MatrixFormat::Int4(self.format),
            order,
            expert: None,
            stored_as: StoredAs::Weight,
            share: None,
        }
    }

    /// What an element is, exactly.
    pub(crate) fn element(&self, output: usize, input: usize) -> f32 {
        let group = self.order[input];
        let steps = self.codes[output][input] as i32 - self.zeros[output][group] as i32;
        steps as f32 * self.scales[output][group]
    }
}

pub(crate) fn formats() -> impl Iterator<Item = Int4Format> {
    let packings = [
        Int4Packing::Compressed { symmetric: true },
        Int4Packing::Compressed { symmetric: false },
        Int4Packing::Awq,
        Int4Packing::Gptq { zeros_less_one: true },
        Int4Packing::Gptq {
            zeros_less_one: false,
        },
    ];
    let groups = [
        Int4Groups::Of32,
        Int4Groups::Of64,
        Int4Groups::Of128,
        Int4Groups::Channel,
    ];
    packings.into_iter().flat_map(move |packing| {
        groups.into_iter().flat_map(move |groups| {
            let orders = [false, true]
                .into_iter()
                .filter(move |&ordered| !ordered || packing != Int4Packing::Awq);
            orders.map(move |ordered| Int4Format {
                packing,
                groups,
                ordered,
            })
        })
    })
}

#[test]
fn every_layout_is_read_by_its_definition() {
    for (seed, format) in (0..).zip(formats()) {
        let mut rng = StdRng::seed_from_u64(seed);
        let outputs = 8 * rng.random_range(1..20);
        let inputs = 8 * rng.random_range(1..40);
        let plain = Plain::random(format, outputs, inputs, &mut rng);
        let tensors = plain.tensors();
        let parts = [1, 3, 0, 4].map(|part| part * outputs / 8);
        for order in [RowOrder::Plain, RowOrder::Grouped { groups: 1, parts }] {
            let mut checked = Checked::new(&tensors);
            let stored = checked
                .matrix(&plain.matrix(order))
                .unwrap_or_else(|error| panic!("{format:?}: {error}"));
            let found = stored.dequantised().unwrap();
            assert_eq!(
                (&found.shape.0[..], found.order),
                (&[outputs, inputs][..], RowOrder::Plain)
            );
            let found = found.widen().unwrap();
            for (row, found) in found.chunks_exact(inputs).enumerate() {
                let want: Vec<f32> = (0..inputs)
                    .map(|input| bf16::from_f32(plain.element(order.stored(row), input)).to_f32())
                    .collect();
                assert_eq!(found, want, "{format:?}, {order:?}, row {row}");
            }
            checked.finish().unwrap();
        }
    }
}

/// Loading names the part of the matrix that was changed, and says this of it.
fn refuses(format: Int4Format, part: &str, says: &str, change: impl Fn(&mut Tensors, &str)) {
    let plain = Plain::random(format, 16, 256, &mut StdRng::seed_from_u64(7));
    let (mut tensors, name) = (plain.tensors(), format!("{MODULE}.{part}"));
    change(&mut tensors, &name);
    let stored = Checked::new(&tensors).matrix(&plain.matrix(RowOrder::Plain));
    let error = stored
        .and_then(StoredMatrix::dequantised)
        .unwrap_err()
        .to_string();
    assert!(error.starts_with(&format!("tensor `{name}`{says}")), "{error}");
}

#[test]
fn what_is_wrong_is_named() {
    let of = |packing| Int4Format {
        packing,
        groups: Int4Groups::Of128,
        ordered: true,
    };
    let compressed = of(Int4Packing::Compressed { symmetric: false });
    let gptq = of(Int4Packing::Gptq { zeros_less_one: true });
    for (format, names) in [
        (
            compressed,
            [
                "weight_packed",
                "weight_scale",
                "weight_zero_point",
                "weight_g_idx",
            ],
        ),
        (gptq, ["qweight", "scales", "qzeros", "g_idx"]),
    ] {
        for name in names {
            refuses(format, name, " is missing", |tensors, name| {
                drop(tensors.0.remove(name))
            });
            refuses(format, name, " has shape", |tensors, name| {
                tensors.0.get_mut(name).unwrap().1.push(1)
            });
            refuses(format, name, " has type U8", |tensors, name| {
                tensors.0.get_mut(name).unwrap().0 = WeightType::U8
            });
        }
    }
    let set = |at: usize, to: u8| {
        move |tensors: &mut Tensors, name: &str| tensors.0.get_mut(name).unwrap().2[at] = to
    };
    refuses(gptq, "scales", ": element 0 is", set(1, 0x7c));
    refuses(gptq, "g_idx", ": input 1 is in group 2 of 2", set(4, 2));
    refuses(compressed, "weight_shape", ": says [17, 256]", set(0, 17));
}

#[test]
fn biases_of_zeros_are_dropped_and_others_are_not() {
    let format = Int4Format {
        packing: Int4Packing::Gptq { zeros_less_one: true },
        groups: Int4Groups::Of128,
        ordered: false,
    };
    let plain = Plain::random(format, 16, 256, &mut StdRng::seed_from_u64(3));
    let name = format!("{MODULE}.bias");
    for (last, is_dropped) in [(0.0_f32, true), (0.5, false)] {
        let mut tensors = plain.tensors();
        let bias: Vec<u8> = [[0.0; 15].as_slice(), &[last]]
            .concat()
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        tensors.0.insert(name.clone(), (WeightType::F32, vec![16], bias));
        let mut checked = Checked::new(&tensors);
        checked.matrix(&plain.matrix(RowOrder::Plain)).unwrap();
        match checked.finish() {
            Ok(()) => assert!(is_dropped),
            Err(ModelError::UnusedTensors { names }) => assert!(!is_dropped && names == name),
            Err(other) => panic!("{other}"),
        }
    }
}
