//! Which way is fastest for each linear layer, measured once the weights are there.

use half::bf16;
use plimsoll_core::{BlockSize, Component};
use plimsoll_device::cuda::GpuSlice;
use plimsoll_kernels::Activation;
use plimsoll_kernels::cuda::{
    AddNormed, ChainUse, GpuLinear, GpuNorm, LinearOutput, LinearScratch, LinearUse, LinearWays, RowLayersUse,
};

use super::Decoder;
use super::chain::{WholeLayer, dense_chain_of};
use crate::blocks::{LayerInput, Widths};
use crate::cuda::experts::Experts;
use crate::cuda::step::{dequantised, dequantised_head};
use crate::cuda::weights::{GpuLayer, GpuVector, GpuWeights};
use crate::{DecoderSpec, ModelError, OutputHead};

/// Numbers of rows that linear layers are measured for: those of decode steps, and of prompts.
const MEASURED_ROWS: [usize; 20] = [
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024, 2048, 8192,
];
/// Most rows that are sampled from are fewer.
const MEASURED_HEAD_ROWS: usize = 256;
/// Layers whose products are measured in one launch, one after the other.
const MEASURED_CHAINS: usize = 8;
/// Most bytes of device memory that this takes while the model is loaded: with the libraries' workspace, and what allocators round up
/// to, it stays below a GiB beside the weights.
const MEASURING_BYTES: usize = 896 << 20;

/// Bytes of device memory to measure in.
#[derive(Clone, Copy, Debug)]
struct Scratch {
    x: usize,
    out: usize,
    /// Weights of few bits as `bf16`.
    codes: usize,
}

impl Scratch {
    /// For as many rows as there is room for; more are computed as these are.
    fn new(spec: &DecoderSpec) -> Self {
        let widths = Widths::of(spec);
        let element = size_of::<bf16>();
        let widest = widths.hidden.max(widths.activated).max(widths.attended);
        // Of 16 bits; logits of routers have 32.
        let outputs = widths
            .gate_up
            .max(widths.qkv)
            .max(widths.hidden)
            .max(2 * widths.experts)
            .max(widths.layer_inputs);
        let of_layers = dequantised(&Widths::beside_experts(spec)).unwrap_or(0);
        let logits = match spec.head {
            OutputHead::None => 0,
            OutputHead::Own | OutputHead::Tied => MEASURED_HEAD_ROWS * spec.vocab_size * size_of::<f32>(),
        };
        let of_rows = |rows: usize| Self {
            x: rows * widest * element,
            out: (rows * outputs * element).max(logits),
            codes: of_layers.max(dequantised_head(spec)) * element,
        };
        let scratch = MEASURED_ROWS.iter().rev().map(|&rows| of_rows(rows));
        let mut fitting = scratch.filter(|scratch| scratch.bytes() <= MEASURING_BYTES);
        fitting.next().unwrap_or_else(|| of_rows(1))
    }

    fn bytes(&self) -> usize {
        self.x + self.out + self.codes
    }
}

impl Decoder {
    /// Finds the fastest way for each linear layer and number of rows: on all ranks the same, where all compute the same. Of their own
    /// parts they may choose as they like, and may not even have the same ways: one alone has the bias of a sum. What an earlier process
    /// measured, on all ranks together, is taken over if it holds on all. Returns whether it was measured now.
    pub(super) fn choose_linear_ways(&mut self, earlier: Option<&LinearWays>) -> Result<bool, ModelError> {
        let GpuWeights { spec, decoder, .. } = &self.weights;
        let head: Vec<_> = self.head.iter().map(|head| &head.linear).collect();
        let Scratch { x, out, codes } = Scratch::new(spec);
        // Beside the weights there is room for this, or there would be none for KV.
        let alloc = |bytes| self.gpu.alloc(Component::Arena, bytes);
        let (x, out, weights) = (alloc(x)?, alloc(out)?, alloc(codes)?);
        self.fused.fill_random(x.slice(), 0, 1.0)?;
        let scratch = LinearScratch {
            x: x.slice(),
            out: out.slice(),
            weights: weights.slice(),
        };
        let layers = &decoder.layers;
        let projections = by_shape(layers, |layer| Some(layer.mixer.projections()));
        let output = by_shape(layers, |layer| Some(layer.mixer.output()));
        let gate_up = by_shape(layers, |layer| Some(&layer.mlp.of_all()?.gate_up));
        let down = by_shape(layers, |layer| Some(&layer.mlp.of_all()?.down));
        let of_inputs = |pick: fn(&LayerInput<GpuLinear, GpuVector>) -> &GpuLinear| {
            by_shape(layers, move |layer| layer.input.as_ref().map(pick))
        };
        let (input_gates, inputs) = (
            of_inputs(|input| &input.gate),
            of_inputs(|input| &input.projection),
        );
        let all_inputs = alike(decoder.per_layer.iter().map(|own| &own.projection));
        let routers = self.experts.iter().flat_map(Experts::routers);
        let routers = alike(routers);
        let plain = |layers, output| LinearUse {
            layers,
            output,
            rows: &MEASURED_ROWS,
        };
        let (mut uses, mut shared) = (Vec::new(), Vec::new());
        let activations = [Activation::Silu, Activation::GeluTanh];
        let used = |activation: &Activation| {
            let mut mlps = spec.layers.iter().filter_map(|layer| layer.mlp_of_all());
            mlps.any(|mlp| mlp.activation == *activation)
        };
        for (groups, kind) in [
            (&projections, LinearOutput::Bf16),
            (&output, LinearOutput::Bf16),
            (&gate_up, LinearOutput::Bf16),
            (&down, LinearOutput::Bf16),
        ] {
            uses.extend(groups.iter().map(|layers| plain(layers, kind)));
        }
        // What every rank computes whole.
        for (groups, kind) in [
            (&input_gates, LinearOutput::Bf16),
            (&inputs, LinearOutput::Bf16),
            (&all_inputs, LinearOutput::Bf16),
            (&routers, LinearOutput::F32),
        ] {
            shared.extend(groups.iter().map(|layers| plain(layers, kind)));
        }
        let whole = by_shape(layers, |layer| {
            let gate_up = &layer.mlp.of_all()?.gate_up;
            (gate_up.products().len() == 1).then_some(gate_up)
        });
        for activation in activations.into_iter().filter(used) {
            let kind = LinearOutput::Glu(activation);
            uses.extend(whole.iter().map(|layers| plain(layers, kind)));
        }
        if !head.is_empty() {
            let uses = match spec.vocab_shard.ranks {
                1 => &mut shared,
                _ => &mut uses,
            };
            uses.push(LinearUse {
                rows: MEASURED_ROWS
                    .split_at(MEASURED_ROWS.partition_point(|&rows| rows <= MEASURED_HEAD_ROWS))
                    .0,
                ..plain(&head, LinearOutput::F32)
            });
        }
        let earlier = earlier.map(|ways| self.linears.take_over(ways, uses.iter().chain(&shared), scratch));
        if let Some(Err(stale)) = &earlier {
            tracing::info!(
                "linear layers are measured again, the choices of an earlier start do not hold: {stale}"
            );
        }
        let holds = matches!(earlier, Some(Ok(())));
        let holds = (self.link.as_ref()).map_or(Ok(holds), |link| link.holds_on_all_ranks(holds))?;
        if !holds {
            self.linears.forget();
            // What is shared comes behind the others: where shapes are the same, these choices hold.
            match &self.link {
                None => {
                    let all: Vec<_> = uses.iter().chain(&shared).copied().collect();
                    self.linears.measure(&all, scratch)?;
                }
                Some(link) => {
                    self.linears.measure(&uses, scratch)?;
                    (self.linears).measure_together(&shared, scratch, &mut |ways| link.longest(ways))?;
                }
            }
        }
        for choice in self.linears.choices() {
            tracing::debug!(%choice, measured = !holds, "linear layer");
        }
        for LinearUse { layers, output, .. } in uses.iter().chain(&shared) {
            let first = layers[0];
            if output.stacked() == 1 && !self.linears.has_own(first, *output) {
                tracing::info!(
                    inputs = first.inputs(),
                    outputs = first.outputs(),
                    "no kernel of our own streams the weights of such layers on this GPU: cuBLASLt computes them for few rows too"
                );
            }
        }
        if !holds {
            self.measure_chains(scratch)?;
        }
        Ok(!holds)
    }

    /// Finds out which layers' products are one launch in steps of one row.
    fn measure_chains(&mut self, scratch: LinearScratch<'_>) -> Result<(), ModelError> {
        if self.all_reduce().is_some() {
            return Ok(());
        }
        let layers = &self.weights.decoder.layers;
        let chain = |index: usize| {
            let (_, [output, gate_up, down]) = dense_chain_of(&layers[index])?;
            let next = layers.get(index + 1)?.mixer.projections();
            Some([output, gate_up, down, next])
        };
        for (kind, &first) in self.kinds.iter().enumerate() {
            let alike = (0..layers.len()).filter(|index| self.kind_of[*index] == kind);
            let mut alike: Vec<_> = alike.filter_map(chain).collect();
            let (Some(mlp), Some(&[.., next])) = (layers[first].spec.mlp_of_all(), alike.first()) else {
                continue;
            };
            alike.retain(|[.., other]| other.is_like(next));
            alike.truncate(MEASURED_CHAINS);
            let of = ChainUse {
                layers: &alike,
                activation: mlp.activation,
            };
            let add_normed = |norm: GpuNorm<'_>, [hidden, delta, normed]: [GpuSlice<'_, bf16>; 3]| {
                self.fused
                    .sandwich_norm(hidden, delta, norm.weight, None, norm, normed)
            };
            let add_normed: Option<&AddNormed<'_>> = match layers[first].spec.post_norms {
                true => Some(&add_normed),
                false => None,
            };
            let Some([together, apart]) = self.linears.measure_chain(of, add_normed, scratch)? else {
                continue;
            };
            tracing::debug!(
                kind,
                together,
                apart,
                "microseconds of a layer's products for one row"
            );
            let whole = (0..layers.len()).filter(|index| self.kind_of[*index] == kind);
            let whole: Vec<_> = whole.filter_map(|index| WholeLayer::of(&layers[index])).collect();
            let Some(first) = whole.first() else { continue };
            let products: Vec<_> = whole.iter().map(|layer| layer.products).collect();
            let of = RowLayersUse {
                layers: &products[..products.len().min(MEASURED_CHAINS)],
                heads: first.spec.heads,
                layout: first.layout(BlockSize::default()),
                activation: first.mlp.activation,
                apart: together.min(apart),
            };
            if let Some(whole) = self.linears.measure_row_layers(of, scratch)? {
                tracing::debug!(kind, whole, "microseconds of a whole layer for one row");
            }
        }
        Ok(())
    }
}

/// Products of one shape, whose weights a measurement takes in turn.
fn by_shape<'a>(
    layers: &'a [GpuLayer],
    pick: impl Fn(&'a GpuLayer) -> Option<&'a GpuLinear>,
) -> Vec<Vec<&'a GpuLinear>> {
    alike(layers.iter().filter_map(pick).flat_map(GpuLinear::products))
}

fn alike<'a>(linears: impl Iterator<Item = &'a GpuLinear>) -> Vec<Vec<&'a GpuLinear>> {
    let mut groups: Vec<Vec<&GpuLinear>> = Vec::new();
    for linear in linears {
        match groups.iter_mut().find(|group| group[0].is_like(linear)) {
            Some(group) => group.push(linear),
            None => groups.push(vec![linear]),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use plimsoll_kernels::WeightType;

    use super::*;
    use crate::quantization::{GgufTypes, Quantization};
    use crate::{HfOverrides, ModelConfig};

    fn spec(hidden: usize, inner: usize, vocab: usize) -> DecoderSpec {
        let config = format!(
            r#"{{"architectures": ["LlamaForCausalLM"], "vocab_size": {vocab}, "hidden_size": {hidden},
            "intermediate_size": {inner}, "num_hidden_layers": 1, "num_attention_heads": {}, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 500000.0}}"#,
            hidden / 128
        );
        let config = ModelConfig::from_json(Path::new("config.json"), &config, &HfOverrides::default());
        config.unwrap().spec
    }

    /// Of the shapes of Llama 3.1 8B and 405B, in floats and in a type of GGUF: a GiB holds it and the libraries' workspace.
    #[test]
    fn scratch_is_bounded() {
        for (hidden, inner, vocab) in [
            (4096, 14336, 128_256),
            (16384, 53248, 128_256),
            (16384, 53248, 262_144),
        ] {
            let mut spec = spec(hidden, inner, vocab);
            let floats = Scratch::new(&spec);
            let modules = ["lm_head", "model.layers.0.mlp.down_proj"];
            let types = modules.map(|module| (module.to_owned(), WeightType::Q6K));
            spec.quantization = Quantization::of_gguf(GgufTypes::new(types.into()));
            let codes = Scratch::new(&spec);
            assert!(floats.codes == 0 && codes.codes > 0, "{codes:?}");
            for scratch in [floats, codes] {
                assert!(scratch.bytes() <= MEASURING_BYTES, "{scratch:?}");
                // At least as many rows as a large batch has.
                assert!(scratch.x >= 512 * inner * size_of::<bf16>(), "{scratch:?}");
            }
        }
    }
}
