//! What a state owns besides the weights.

pub(crate) use plimsoll_core::mask::words as mask_words;
use plimsoll_core::{Component, KvConfig, Oom, StepLimits, TokenId};
use plimsoll_device::{Budget, Slab};
use plimsoll_kernels::DeltaLayout;

use crate::spec::Mixer;
use crate::tables::LayerPage;
use crate::{DecoderSpec, ModelError};

/// Element of the KV cache (`--kv-cache-dtype`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvCacheDtype {
    /// What suits the device: bf16 on a GPU; on a CPU f32 for weights stored as f32, otherwise f16.
    #[default]
    Auto,
    /// 4 bytes.
    F32,
    /// 2 bytes.
    F16,
    /// 1 byte, e4m3, with a scale per layer; on a GPU.
    Fp8,
}

/// Element of the KV cache on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KvElementType {
    F32,
    F16,
}

impl KvElementType {
    /// What `dtype` comes to, for a model of which `all_f32` says whether every projection is stored as f32.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for what only a GPU has.
    pub(crate) fn choose(dtype: KvCacheDtype, all_f32: bool) -> Result<Self, ModelError> {
        match dtype {
            KvCacheDtype::F32 => Ok(Self::F32),
            KvCacheDtype::Auto if all_f32 => Ok(Self::F32),
            KvCacheDtype::F16 | KvCacheDtype::Auto => Ok(Self::F16),
            KvCacheDtype::Fp8 => Err(ModelError::unsupported(
                "--kv-cache-dtype",
                "fp8",
                "float16 and float32 are on a CPU; fp8 needs a GPU",
            )),
        }
    }

    /// Bytes.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
        }
    }
}

/// The paged KV cache: per layer of a page K then V, as [`plimsoll_kernels::KvLayout`] says.
#[derive(Debug)]
pub(crate) struct KvCache {
    pub(crate) slab: Slab,
    pub(crate) config: KvConfig,
    /// Where each layer's keys and values are.
    pub(crate) pages: Vec<LayerPage>,
    pub(crate) element: KvElementType,
}

impl KvCache {
    pub(crate) fn new(
        budget: &Budget,
        spec: &DecoderSpec,
        element: KvElementType,
        config: KvConfig,
        touches: &mut dyn FnMut(),
    ) -> Result<Self, Oom> {
        let layout = spec.cache_layout(&config.groups, config.block_size);
        let bytes = usize::try_from(spec.kv_bytes(config, element.size()))
            .ok()
            .filter(|&bytes| bytes < usize::MAX)
            .ok_or_else(|| budget.oom(Component::Kv, u64::MAX))?;
        Ok(Self {
            slab: Slab::with(budget, Component::Kv, bytes, touches)?,
            config: KvConfig {
                groups: layout.groups,
                ..config
            },
            pages: LayerPage::all(&layout, config.block_size),
            element,
        })
    }
}

/// The states of fixed size of all slots: of each layer that has one, those of the convolution, `[slots][conv_state]`, then
/// those of the recurrence, `[slots][head_states]`, as [`DeltaLayout`] says, all in `f32`.
#[derive(Debug)]
pub(crate) struct StateCache {
    slab: Slab,
    slots: usize,
}

impl StateCache {
    pub(crate) fn new(
        budget: &Budget,
        spec: &DecoderSpec,
        slots: usize,
        touches: &mut dyn FnMut(),
    ) -> Result<Self, Oom> {
        let bytes = Self::slot_bytes(spec).checked_mul(slots as u64);
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.ok_or_else(|| budget.oom(Component::States, u64::MAX))?;
        Ok(Self {
            slab: Slab::with(budget, Component::States, bytes, touches)?,
            slots,
        })
    }

    /// Bytes of a slot.
    pub(crate) fn slot_bytes(spec: &DecoderSpec) -> u64 {
        (spec.state_elements() as u64).saturating_mul(size_of::<f32>() as u64)
    }

    /// Of each layer that has states: those of the convolution and those of the recurrence.
    pub(crate) fn layers_mut(&mut self, spec: &DecoderSpec) -> Vec<[&mut [f32]; 2]> {
        let (mut rest, slots) = (self.slab.as_mut_slice::<f32>(), self.slots);
        let mut layer = |layout: &DeltaLayout| {
            [layout.conv_state(), layout.head_states()].map(|elements| {
                let part;
                (part, rest) = std::mem::take(&mut rest).split_at_mut(slots * elements);
                part
            })
        };
        spec.delta_nets()
            .map(|delta_net| layer(&delta_net.layout))
            .collect()
    }
}

/// Where a layer keeps what it does of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LayerPlace {
    Page(LayerPage),
    /// Index among the layers with states.
    State(usize),
}

impl LayerPlace {
    /// That of a layer with attention.
    pub(crate) fn page(self) -> LayerPage {
        match self {
            Self::Page(page) => page,
            Self::State(_) => unreachable!("a layer with attention has pages"),
        }
    }

    /// Of each layer; `pages` are of those with attention.
    pub(crate) fn all(spec: &DecoderSpec, pages: &[LayerPage]) -> Vec<Self> {
        let (mut pages, mut states) = (pages.iter(), 0..);
        let place = |mixer: &Mixer| match mixer {
            Mixer::Attention(_) => pages.next().map(|&page| Self::Page(page)),
            Mixer::DeltaNet(_) => states.next().map(Self::State),
        };
        spec.layers
            .iter()
            .map(|layer| &layer.mixer)
            .filter_map(place)
            .collect()
    }
}

/// Input of a step, in memory that is there before the first one.
#[derive(Debug)]
pub(crate) struct Staging {
    /// Ids of all tokens of the batch.
    tokens: Slab,
    /// Of the runs that are constrained, one after the other.
    pub(crate) masks: Slab,
}

impl Staging {
    pub(crate) fn new(budget: &Budget, limits: &StepLimits, vocab_size: usize) -> Result<Self, Oom> {
        let [tokens, masks] = Self::parts(limits, vocab_size)
            .map(|bytes| bytes.ok_or_else(|| budget.oom(Component::Staging, u64::MAX)));
        Ok(Self {
            tokens: Slab::new(budget, Component::Staging, tokens?)?,
            masks: Slab::new(budget, Component::Staging, masks?)?,
        })
    }

    /// Bytes of tokens and masks.
    fn parts(limits: &StepLimits, vocab_size: usize) -> [Option<usize>; 2] {
        let masks = limits.max_num_seqs.checked_mul(mask_words(vocab_size));
        [
            limits.max_num_batched_tokens.checked_mul(size_of::<TokenId>()),
            masks.and_then(|words| words.checked_mul(size_of::<u32>())),
        ]
    }

    /// What it takes; `None` if no memory could hold it.
    pub(crate) fn bytes(limits: &StepLimits, vocab_size: usize) -> Option<usize> {
        let [tokens, masks] = Self::parts(limits, vocab_size);
        tokens?.checked_add(masks?)
    }

    /// Room for `len` tokens, at most as many as the limits allow, and the masks.
    pub(crate) fn parts_mut(&mut self, len: usize) -> (&mut [TokenId], &[u32]) {
        (&mut self.tokens.as_mut_slice()[..len], self.masks.as_slice())
    }
}
