//! What a model and its states take on a CPU, told without weights: from the configuration, the headers of stored weights
//! where there are any, and the formulas by which the real ones take memory.

use std::path::Path;

use plimsoll_core::{KvConfig, Pooling, StepLimits};
use plimsoll_device::DryArena;
use plimsoll_kernels::{LinearShape, WeightType, attention_scratch, sample_scratch};

use crate::blocks::{
    self, Beside, DeltaRule, LayerInput, Matrix, Moe, Norms, Operations, Stack, Vector, Visitor,
};
use crate::decoder::{LOGIT_ROWS, activation_elements, logit_elements};
use crate::encoder::{self, EncoderState};
use crate::model::{Description, check_cpu};
use crate::quantization::MatrixFormat;
use crate::spec::{AttentionSpec, DeltaNetSpec, DenseMlpSpec, LayerSpec, MoeSpec, PerLayerSpec};
use crate::state::{KvElementType, Staging, StateCache};
use crate::weights::Checked;
use crate::{DecoderSpec, EncoderSpec, LoadFormat, LoadOptions, ModelConfig, ModelError};

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
    decoder: blocks::Decoder<LinearShape, LinearShape, ()>,
    /// Bytes that a state has for images: activations of the largest, the arena of its encode, and embeddings.
    encoder: [u64; 3],
}

impl Footprint {
    /// Reads config.json, or the header of a GGUF file, and those of safetensors where they are there: the weights' types
    /// are then as stored. Without, they are what config.json says. No weights are read.
    ///
    /// # Errors
    /// As [`crate::Model::load`], as far as what is read tells.
    pub fn read(path: &Path, options: LoadOptions) -> Result<Self, ModelError> {
        let description = Description::read(path, &options.serve_as)?;
        check_cpu(description.about.spec())?;
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
        let spec = description.about.spec().shard(options.shard)?;
        let decoder = blocks::Decoder::visit(&spec, &mut sizes)?;
        let all_f32 = sizes.all_f32;
        let encoder = match &description.about.config.encoder {
            None => [0; 3],
            Some(spec) => encoder_bytes(spec, &blocks::Encoder::visit(spec, &mut sizes)?),
        };
        let Sizes {
            types,
            weights,
            all_f32: _,
        } = sizes;
        if let Types::Stored(checked) = types {
            checked.finish()?;
        }
        drop(stored);
        Ok(Self {
            weights: weights.unwrap_or(u64::MAX),
            kv_element: KvElementType::choose(options.kv_cache_dtype, all_f32)?,
            decoder,
            encoder,
            config: ModelConfig {
                spec,
                ..description.about.config
            },
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
        self.spec().kv_bytes_per_token(self.kv_element.size())
    }

    /// Bytes of a KV cache.
    pub fn kv_bytes(&self, config: KvConfig) -> u64 {
        self.spec().kv_bytes(config, self.kv_element.size())
    }

    /// As [`crate::Model::state_bytes`].
    pub fn state_bytes(&self) -> u64 {
        StateCache::slot_bytes(self.spec())
    }

    /// Bytes of a state's staging.
    pub fn staging_bytes(&self, limits: &StepLimits) -> u64 {
        Staging::bytes(limits, self.spec().num_logits()).map_or(u64::MAX, |bytes| bytes as u64)
    }

    /// Bytes that a state has for images: what the largest that limits allow takes, and embeddings that are kept; `u64::MAX` if no
    /// memory could hold it.
    pub fn encoder_bytes(&self) -> u64 {
        self.encoder
            .iter()
            .fold(0, |sum, &bytes| sum.saturating_add(bytes))
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
        arena.alloc::<f32>(activation_elements(spec, tokens)?)?;
        let given = match self.config.pooling() {
            Some(Pooling::Mean) => tokens,
            Some(Pooling::Last) => samples,
            None => read,
        };
        let mut layers = CountStep {
            rows: tokens,
            given,
            arena,
        };
        self.decoder.forward(spec, &mut layers).ok()?;
        let Some(lm_head) = &self.decoder.head else {
            return Some(());
        };
        for elements in logit_elements(spec, read)? {
            arena.alloc::<f32>(elements)?;
        }
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

/// Bytes of the activations of the largest image, of the arena that its encode takes, and of the embeddings that are kept.
pub(crate) fn encoder_bytes(spec: &EncoderSpec, weights: &blocks::Encoder<LinearShape, ()>) -> [u64; 3] {
    let mut arena = DryArena::default();
    let scratch = encoder::count(spec, weights, &mut arena).map(|()| arena.take_high_water());
    let (activations, kept) = (
        EncoderState::activation_bytes(spec),
        EncoderState::embedding_bytes(spec),
    );
    [activations, scratch, kept].map(|bytes| bytes.map_or(u64::MAX, |bytes| bytes as u64))
}

/// Counts what the operations of [`crate::decoder`] take from the arena.
struct CountStep<'a> {
    /// Rows that are computed.
    rows: usize,
    given: usize,
    arena: &'a mut DryArena,
}

/// No memory could hold it.
struct Boundless;

impl CountStep<'_> {
    fn linear(&mut self, linear: &LinearShape) -> Result<(), Boundless> {
        linear.scratch(self.rows, self.arena).ok_or(Boundless)
    }
}

impl Operations<LinearShape, ()> for CountStep<'_> {
    type Error = Boundless;

    fn make_layer_inputs(&mut self, projection: &LinearShape, _: &(), _: f32) -> Result<(), Boundless> {
        self.linear(projection)
    }

    fn begin_layer(&mut self, _: usize) {}

    fn project(&mut self, _: &Norms<'_, ()>, linear: &LinearShape, _: usize) -> Result<(), Boundless> {
        self.linear(linear)
    }

    fn write_kv(&mut self, _: &LayerSpec, _: &AttentionSpec, _: Option<&[(); 2]>) -> Result<(), Boundless> {
        Ok(())
    }

    fn rotate_queries(&mut self, _: &LayerSpec, _: &AttentionSpec, _: Option<&()>) -> Result<(), Boundless> {
        Ok(())
    }

    fn attend(&mut self, spec: &AttentionSpec, _: Option<&()>) -> Result<(), Boundless> {
        attention_scratch(spec.head_dim, spec.heads / spec.kv_heads, self.arena).ok_or(Boundless)
    }

    fn apply_delta_rule(
        &mut self,
        _: &LayerSpec,
        _: &DeltaNetSpec,
        _: &DeltaRule<()>,
    ) -> Result<(), Boundless> {
        Ok(())
    }

    fn rows_given(&self) -> usize {
        self.given
    }

    fn keep_given(&mut self, _: usize) -> Result<(), Boundless> {
        self.rows = self.given;
        Ok(())
    }

    fn project_output(&mut self, output: &LinearShape) -> Result<(), Boundless> {
        self.linear(output)
    }

    fn project_gated(
        &mut self,
        _: &DenseMlpSpec,
        _: &Norms<'_, ()>,
        gate_up: &LinearShape,
    ) -> Result<(), Boundless> {
        self.linear(gate_up)
    }

    fn project_down(&mut self, _: &DenseMlpSpec, down: &LinearShape) -> Result<(), Boundless> {
        self.linear(down)
    }

    fn experts_beside(
        &mut self,
        spec: &MoeSpec,
        eps: f32,
        beside: &Beside<LinearShape, ()>,
    ) -> Result<(), Boundless> {
        let norms = Norms {
            added: None,
            weight: &(),
            eps,
        };
        self.experts(spec, &norms, &beside.moe)
    }

    fn settle(&mut self, _: Option<&()>, _: f32) -> Result<(), Boundless> {
        Ok(())
    }

    fn gate_layer_input(
        &mut self,
        _: &PerLayerSpec,
        input: &LayerInput<LinearShape, ()>,
    ) -> Result<(), Boundless> {
        self.linear(&input.gate)?;
        self.linear(&input.projection)
    }

    fn scale(&mut self, (): &()) -> Result<(), Boundless> {
        Ok(())
    }

    /// Each expert that is hit takes as much as if all rows went to it.
    fn experts(&mut self, _: &MoeSpec, _: &Norms<'_, ()>, moe: &Moe<LinearShape>) -> Result<(), Boundless> {
        self.linear(&moe.router)?;
        for (gate_up, down) in moe.gate_up.iter().zip(&moe.down) {
            self.linear(gate_up)?;
            self.linear(down)?;
        }
        if let Some(shared) = &moe.shared {
            self.linear(&shared.mlp.gate_up)?;
            self.linear(&shared.mlp.down)?;
            self.linear(&shared.gate)?;
        }
        Ok(())
    }

    fn add_features(&mut self, _: usize) -> Result<(), Boundless> {
        Ok(())
    }

    fn finish(&mut self, _: &Norms<'_, ()>) -> Result<(), Boundless> {
        Ok(())
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

impl Visitor for Sizes<'_> {
    /// Kept as f32.
    type Vector = ();
    type Linear = LinearShape;
    type Embedding = LinearShape;
    type Error = ModelError;

    fn vector(&mut self, vector: &Vector) -> Result<(), ModelError> {
        if let Types::Stored(tensors) = &mut self.types {
            tensors.vector(vector)?;
        }
        self.add(Some((vector.len * size_of::<f32>()) as u64));
        Ok(())
    }

    fn optional_vector(&mut self, vector: &Vector) -> Result<Option<()>, ModelError> {
        let there = match &mut self.types {
            Types::Stored(tensors) => tensors.optional_vector(vector)?.is_some(),
            Types::All(_) => false,
        };
        if there {
            self.add(Some((vector.len * size_of::<f32>()) as u64));
        }
        Ok(there.then_some(()))
    }

    fn linear(&mut self, stack: &Stack) -> Result<LinearShape, ModelError> {
        if let Types::Stored(tensors) = &mut self.types {
            tensors.kv_scales(&stack.kv_scales)?;
        }
        let shape = self.matrices(&stack.parts)?;
        for bias in stack.biases() {
            self.vector(&bias)?;
        }
        self.all_f32 &= shape.parts.iter().all(|&(dtype, _)| dtype == WeightType::F32);
        Ok(shape)
    }

    fn embedding(&mut self, table: &Matrix) -> Result<LinearShape, ModelError> {
        self.matrices(std::slice::from_ref(table))
    }

    fn idle(&mut self, name: String) {
        if let Types::Stored(tensors) = &mut self.types {
            tensors.idle(&name);
        }
    }

    fn tied(&mut self, embedding: &LinearShape) -> LinearShape {
        embedding.clone()
    }
}

impl Sizes<'_> {
    /// Matrices of the same inputs.
    fn matrices(&mut self, matrices: &[Matrix]) -> Result<LinearShape, ModelError> {
        let parts = matrices.iter().map(|matrix| {
            let dtype = match &mut self.types {
                Types::Stored(tensors) => tensors.matrix(matrix)?.kept_type(),
                Types::All(_) if matrix.format == MatrixFormat::Mxfp4 => WeightType::Mxfp4,
                Types::All(_) if !matrix.format.may_be_mixed() => WeightType::Bf16,
                Types::All(dtype) => *dtype,
            };
            Ok((dtype, matrix.outputs))
        });
        let shape = LinearShape {
            inputs: matrices[0].inputs,
            parts: parts.collect::<Result<_, ModelError>>()?,
        };
        self.add(shape.bytes());
        Ok(shape)
    }

    fn add(&mut self, bytes: Option<u64>) {
        self.weights = self
            .weights
            .zip(bytes)
            .and_then(|(sum, bytes)| sum.checked_add(bytes));
    }
}
