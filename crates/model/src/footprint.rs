//! What a model and its states take on a CPU, told without weights: from the configuration, the headers of stored weights
//! where there are any, and the formulas by which the real ones take memory.

use std::path::Path;

use plimsoll_core::{KvConfig, Pooling, StepLimits};
use plimsoll_device::DryArena;
use plimsoll_kernels::{LinearShape, WeightType, attention_scratch, sample_scratch};

use crate::decoder::activation_widths;
use crate::model::Description;
use crate::runner::LOGIT_ROWS;
use crate::state::{KvElementType, Staging};
use crate::weights::{Checked, LayerTensors, OuterTensors, Stack, Vector};
use crate::{DecoderSpec, LoadFormat, LoadOptions, ModelConfig, ModelError, OutputHead};

/// How large a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSize {
    /// Tokens.
    pub tokens: usize,
    /// Rows that are sampled from; of a model for embeddings, vectors that are made.
    pub samples: usize,
    /// Rows whose next token is a prompt's and scored.
    pub scored: usize,
}

/// What steps take from a growable arena, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaUse {
    /// Most that each step uses at once.
    pub scratch: Vec<u64>,
    /// Most that the arena ever holds.
    pub peak: u64,
    /// What it holds in the end.
    pub held: u64,
}

impl ArenaUse {
    /// What fits no memory.
    pub(crate) fn boundless(steps: usize) -> Self {
        Self {
            scratch: vec![u64::MAX; steps],
            peak: u64::MAX,
            held: u64::MAX,
        }
    }
}

/// A model on a CPU, without its weights.
#[derive(Clone, Debug)]
pub struct Footprint {
    config: ModelConfig,
    /// Bytes; `u64::MAX` if they fit no memory.
    weights: u64,
    kv_element: KvElementType,
    layers: Vec<LayerShapes>,
    /// Nothing is sampled where there is none.
    lm_head: Option<LinearShape>,
}

/// The projections of a block.
#[derive(Clone, Debug)]
struct LayerShapes {
    qkv: LinearShape,
    output: LinearShape,
    gate_up: LinearShape,
    down: LinearShape,
}

impl Footprint {
    /// Reads config.json, or the header of a GGUF file, and those of safetensors where they are there: the weights' types
    /// are then as stored. Without, they are what config.json says. No weights are read.
    ///
    /// # Errors
    /// As [`crate::Model::load`], as far as what is read tells.
    pub fn read(path: &Path, options: LoadOptions) -> Result<Self, ModelError> {
        let description = Description::read(path, options.serve_as)?;
        let stored = match options.format {
            LoadFormat::Auto => description.stored()?,
            LoadFormat::Dummy { .. } => None,
        };
        let types = match &stored {
            Some(source) => Types::Stored(Checked::new(&**source)),
            None => Types::All(description.dummy(0).stored_type()),
        };
        let mut sizes = Sizes {
            types,
            weights: Some(0),
            all_f32: true,
        };
        let spec = &description.config.spec;
        let tensors = OuterTensors::new(spec);
        sizes.optional_vector(&tensors.rope_factors)?;
        let embedding = sizes.packed(&tensors.embedding)?;
        let lm_head = match (&tensors.lm_head, spec.head) {
            (Some(stack), _) => Some(sizes.linear(stack)?),
            (None, OutputHead::None) => None,
            (None, _) => Some(embedding),
        };
        let layers = (0..spec.num_layers)
            .map(|index| LayerShapes::read(&LayerTensors::new(spec, index), &mut sizes))
            .collect::<Result<_, _>>()?;
        sizes.vector(&tensors.final_norm)?;
        let Sizes {
            types,
            weights,
            all_f32,
        } = sizes;
        if let Types::Stored(checked) = types {
            checked.finish()?;
        }
        drop(stored);
        Ok(Self {
            weights: weights.unwrap_or(u64::MAX),
            kv_element: KvElementType::choose(options.kv_cache_dtype, all_f32),
            layers,
            lm_head,
            config: description.config,
        })
    }

    /// What the model says about itself.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of the weights; `u64::MAX` if they fit no memory.
    pub fn weights_bytes(&self) -> u64 {
        self.weights
    }

    /// As [`crate::Model::kv_bytes_per_token`].
    pub fn kv_bytes_per_token(&self) -> u64 {
        self.kv_element.bytes_per_token(&self.config.spec)
    }

    /// Bytes of a KV cache.
    pub fn kv_bytes(&self, config: KvConfig) -> u64 {
        let tokens = (config.num_pages as u64).saturating_mul(config.block_size.tokens() as u64);
        self.kv_bytes_per_token().saturating_mul(tokens)
    }

    /// Bytes of a state's staging.
    pub fn staging_bytes(&self, limits: &StepLimits) -> u64 {
        Staging::bytes(limits, self.spec().num_logits()).map_or(u64::MAX, |bytes| bytes as u64)
    }

    /// What `steps`, one after the other, take from the arena.
    pub fn arena(&self, steps: &[StepSize]) -> ArenaUse {
        let mut arena = DryArena::default();
        let scratch = steps.iter().map(|&step| {
            self.count_step(step, &mut arena)?;
            Some(arena.take_high_water() as u64)
        });
        match scratch.collect() {
            None => ArenaUse::boundless(steps.len()),
            Some(scratch) => ArenaUse {
                scratch,
                peak: arena.peak_capacity() as u64,
                held: arena.capacity() as u64,
            },
        }
    }

    /// The allocations of [`crate::Runner`] in one step, in its order; `None` if no memory could hold them.
    fn count_step(&self, step: StepSize, arena: &mut DryArena) -> Option<()> {
        let StepSize {
            tokens,
            samples,
            scored,
        } = step;
        let read = samples + scored;
        let spec = &self.config.spec;
        arena.reset();
        for width in activation_widths(spec) {
            arena.alloc::<f32>(tokens.checked_mul(width)?)?;
        }
        for (index, layer) in self.layers.iter().enumerate() {
            layer.qkv.scratch(tokens, arena)?;
            attention_scratch(spec.head_dim, spec.num_heads / spec.num_kv_heads, arena)?;
            // After the last attention only the rows that are given out matter.
            let rows = match self.config.pooling() {
                _ if index + 1 < self.layers.len() => tokens,
                Some(Pooling::Mean) => tokens,
                Some(Pooling::Last) => samples,
                None => read,
            };
            for linear in [&layer.output, &layer.gate_up, &layer.down] {
                linear.scratch(rows, arena)?;
            }
        }
        let Some(lm_head) = &self.lm_head else {
            return Some(());
        };
        arena.alloc::<f32>(read.min(LOGIT_ROWS).checked_mul(spec.vocab_size)?)?;
        for first in (0..read).step_by(LOGIT_ROWS) {
            lm_head.scratch(LOGIT_ROWS.min(read - first), arena)?;
        }
        if samples > 0 {
            sample_scratch(spec.vocab_size, arena)?;
        }
        Some(())
    }

    /// The network.
    pub fn spec(&self) -> &DecoderSpec {
        &self.config.spec
    }
}

impl LayerShapes {
    fn read(tensors: &LayerTensors, sizes: &mut Sizes<'_>) -> Result<Self, ModelError> {
        for vector in tensors.qk_norm.iter().flatten() {
            sizes.vector(vector)?;
        }
        sizes.vector(&tensors.attention_norm)?;
        sizes.vector(&tensors.mlp_norm)?;
        Ok(Self {
            qkv: sizes.linear(&tensors.qkv)?,
            output: sizes.linear(&tensors.output)?,
            gate_up: sizes.linear(&tensors.gate_up)?,
            down: sizes.linear(&tensors.down)?,
        })
    }
}

/// How tensors are stored.
enum Types<'a> {
    /// As their headers say.
    Stored(Checked<'a>),
    /// All alike, and none that a model may do without.
    All(WeightType),
}

/// Adds up what a [`crate::weights::Loader`] would charge.
struct Sizes<'a> {
    types: Types<'a>,
    weights: Option<u64>,
    /// Every projection so far is stored as f32.
    all_f32: bool,
}

impl Sizes<'_> {
    /// Stacked projections.
    fn linear(&mut self, stack: &Stack) -> Result<LinearShape, ModelError> {
        let shape = self.packed(stack)?;
        for bias in stack.biases() {
            self.vector(&bias)?;
        }
        self.all_f32 &= shape.parts.iter().all(|&(dtype, _)| dtype == WeightType::F32);
        Ok(shape)
    }

    /// The matrices of a stack.
    fn packed(&mut self, stack: &Stack) -> Result<LinearShape, ModelError> {
        let parts = stack.weights().map(|(name, outputs)| {
            let dtype = self.stored_type(&name, &[outputs, stack.inputs])?;
            Ok((dtype, outputs))
        });
        let shape = LinearShape {
            inputs: stack.inputs,
            parts: parts.collect::<Result<_, ModelError>>()?,
        };
        self.add(shape.bytes());
        Ok(shape)
    }

    /// A vector, which is kept as f32.
    fn vector(&mut self, vector: &Vector) -> Result<(), ModelError> {
        self.stored_type(&vector.name, &[vector.len])?;
        self.add(Some((vector.len * size_of::<f32>()) as u64));
        Ok(())
    }

    fn optional_vector(&mut self, vector: &Vector) -> Result<(), ModelError> {
        let there = match &mut self.types {
            Types::Stored(tensors) => tensors.optional(&vector.name, &[vector.len])?.is_some(),
            Types::All(_) => false,
        };
        if there {
            self.add(Some((vector.len * size_of::<f32>()) as u64));
        }
        Ok(())
    }

    fn stored_type(&mut self, name: &str, expected: &[usize]) -> Result<WeightType, ModelError> {
        match &mut self.types {
            Types::Stored(tensors) => Ok(tensors.tensor(name, expected)?.dtype),
            Types::All(dtype) => Ok(*dtype),
        }
    }

    fn add(&mut self, bytes: Option<u64>) {
        self.weights = self
            .weights
            .zip(bytes)
            .and_then(|(sum, bytes)| sum.checked_add(bytes));
    }
}
