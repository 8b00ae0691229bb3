use std::hash::Hash;

use plimsoll_core::{BlockSize, CacheGroups, KvConfig, Pooling, StepLimits};
use serde::Serialize;

use crate::{Disabled, Loading, Plan, ProfileError};

/// What the profile has to find a size for.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileSpec {
    /// The largest step; the worst cases are derived from it.
    pub limits: StepLimits,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// How rows are pooled, where the model is served for embeddings.
    pub pooling: Option<Pooling>,
    /// Tokens per KV block.
    pub block_size: BlockSize,
    /// Bytes one token takes in the KV cache, over all layers, each of which takes the same.
    pub kv_bytes_per_token: u64,
    /// What the layers keep of a request.
    pub groups: CacheGroups,
    /// Bytes of the states of fixed size of one request; 0 where no layer has one.
    pub state_bytes: u64,
    /// Whether prefixes are cached: states then have slots for snapshots too.
    pub prefix_caching: bool,
    /// Most state slots; there is one for each request in any case: see [`CacheGroups::state_slots`].
    pub most_state_slots: usize,
    /// How the linear layers are stored, if not in floats; for reports.
    pub quantization: Option<String>,
    /// Weights the model has, where that is known; for reports.
    pub num_parameters: Option<u64>,
    /// Tokens of a prompt that only one step can compute: advice leaves room for them.
    pub tokens_at_once: usize,
    /// Who decides the size.
    pub size: KvSize,
    /// Part of the room for KV that is used.
    pub mem_fraction: MemFraction,
    /// Most tokens the KV cache is given even if more fit: more would be of no use. `None`: as many as fit.
    pub useful_tokens: Option<usize>,
    /// What is kept free.
    pub margins: Margins,
    /// Most bytes `--device-memory` could grant, where that is known: more is no advice.
    pub largest_device: Option<u64>,
    /// Whether an error says what would fit instead. To find out takes many more tries, which a server that only wants its
    /// state back is not to make.
    pub gives_advice: bool,
    /// What an earlier search found: skips the probe, not the proof. One that does not fit this start is thrown away.
    pub plan: Option<Plan>,
    /// Steps in flight while steps are timed after the proof, as when serving. 0: they are not timed.
    pub timed_in_flight: usize,
    /// Whether a step may take more memory of the device the longer its contexts are. Where it takes as much for the same rows and tokens, a
    /// probe computes no long prefix; the proof does all the same.
    pub contexts_take_memory: bool,
    /// Device memory while the model was loaded; for reports.
    pub loading: Option<Loading>,
    /// What this start does without; the report lists it.
    pub disabled: Vec<Disabled>,
}

impl ProfileSpec {
    /// A spec that measures, with default fraction and margins and no bound but memory.
    pub fn new(
        limits: StepLimits,
        vocab_size: usize,
        block_size: BlockSize,
        kv_bytes_per_token: u64,
    ) -> Self {
        Self {
            limits,
            vocab_size,
            pooling: None,
            block_size,
            kv_bytes_per_token,
            groups: CacheGroups::default(),
            state_bytes: 0,
            prefix_caching: true,
            most_state_slots: usize::MAX,
            quantization: None,
            num_parameters: None,
            tokens_at_once: 1,
            size: KvSize::Auto,
            mem_fraction: MemFraction::default(),
            useful_tokens: None,
            margins: Margins::default(),
            largest_device: None,
            gives_advice: true,
            plan: None,
            timed_in_flight: 0,
            contexts_take_memory: true,
            loading: None,
            disabled: Vec::new(),
        }
    }

    /// Fewest tokens of a step of up to so many requests: one of each, but of one as many as only one step can compute.
    pub(crate) fn least_batched_tokens(&self, max_num_seqs: usize) -> usize {
        max_num_seqs + self.tokens_at_once.saturating_sub(1)
    }

    /// Bits of device memory for each weight, to a hundredth, where all of them take `bytes`.
    pub(crate) fn bits_per_weight(&self, bytes: u64) -> Option<f64> {
        let parameters = self.num_parameters.filter(|&parameters| parameters > 0)?;
        let bits = bytes as f64 * 8.0;
        Some((bits / parameters as f64 * 100.0).round() / 100.0)
    }

    /// Tokens of the probe's KV cache: enough for the largest step and its padding, at least 8192, and whatever the
    /// context length is. The largest graph batch is `max_num_seqs`. A step writes each row to blocks of its own, the
    /// first and the last of them perhaps in part, so there must be blocks for that too.
    pub fn probe_tokens(&self) -> usize {
        let StepLimits {
            max_num_batched_tokens,
            max_num_seqs,
            ..
        } = self.limits;
        (max_num_batched_tokens + max_num_seqs)
            .max(PROBE_TOKENS)
            .max(self.written_tokens())
    }

    /// The probe's KV cache.
    pub(crate) fn probe_kv(&self) -> KvConfig {
        self.kv_of_tokens(self.probe_tokens())
    }

    /// The KV cache beside which steps are measured: the probe's, or, for a size that is pinned, no more than they write.
    pub(crate) fn measured_kv(&self) -> KvConfig {
        match self.size {
            KvSize::Auto => self.probe_kv(),
            KvSize::Tokens(_) | KvSize::Bytes(_) => self.kv_of_tokens(self.written_tokens()),
        }
    }

    /// Capacity of a KV cache that holds what any one step writes.
    pub(crate) fn written_tokens(&self) -> usize {
        let StepLimits {
            max_num_batched_tokens,
            max_num_seqs,
            ..
        } = self.limits;
        let rows = max_num_seqs.min(max_num_batched_tokens);
        (self.block_size.blocks_for(max_num_batched_tokens) + 2 * rows) * self.block_size.tokens()
    }

    pub(crate) fn check(&self) -> Result<(), ProfileError> {
        let StepLimits {
            max_num_batched_tokens,
            max_num_seqs,
            max_model_len,
        } = self.limits;
        let wrong = if max_num_batched_tokens > MAX_STEP {
            "--max-num-batched-tokens must be at most 4194304"
        } else if max_num_seqs > MAX_STEP {
            "--max-num-seqs must be at most 4194304"
        } else if max_model_len > MAX_TOKENS {
            "--max-model-len must be at most 4294967296"
        } else if max_num_batched_tokens == 0 {
            "--max-num-batched-tokens must be at least 1"
        } else if max_num_seqs == 0 {
            "--max-num-seqs must be at least 1"
        } else if max_model_len == 0 {
            "--max-model-len must be at least 1"
        } else if self.vocab_size == 0 {
            "the model has an empty vocabulary"
        } else if self.kv_bytes_per_token == 0 {
            "the model keeps no KV cache, so there is nothing to size"
        } else {
            return Ok(());
        };
        Err(ProfileError::InvalidSpec(wrong))
    }

    /// What ranks must have in common to run the same steps.
    pub(crate) fn shape(&self) -> impl Hash {
        let StepLimits {
            max_num_batched_tokens,
            max_num_seqs,
            max_model_len,
        } = self.limits;
        let size = match self.size {
            KvSize::Auto => (0, 0),
            KvSize::Tokens(tokens) => (1, tokens as u64),
            KvSize::Bytes(bytes) => (2, bytes),
        };
        let limits = (max_num_batched_tokens, max_num_seqs, max_model_len);
        (
            limits,
            self.block_size,
            self.vocab_size,
            self.pooling,
            self.groups,
            self.state_slots(),
            size,
            self.gives_advice,
            self.contexts_take_memory,
        )
    }

    /// KV cache of `num_pages` pages.
    pub(crate) fn kv(&self, num_pages: usize) -> KvConfig {
        KvConfig {
            block_size: self.block_size,
            num_pages,
            groups: self.groups,
            state_slots: self.state_slots(),
        }
    }

    /// State slots: those of `--max-num-seqs` requests, and others for snapshots alone.
    pub fn state_slots(&self) -> usize {
        let requests = self.limits.max_num_seqs;
        self.groups
            .state_slots(requests, self.most_state_slots, self.prefix_caching)
    }

    /// KV cache that holds `tokens` tokens in every group.
    pub(crate) fn kv_of_tokens(&self, tokens: usize) -> KvConfig {
        self.kv(self.kv(0).pages_for(tokens))
    }

    /// Pages of a size that is not the profile's to choose.
    pub(crate) fn pinned_pages(&self) -> Option<usize> {
        match self.size {
            KvSize::Auto => None,
            KvSize::Tokens(tokens) => Some(self.kv_of_tokens(tokens).num_pages),
            KvSize::Bytes(bytes) => Some(usize::try_from(bytes / self.page_bytes()).unwrap_or(usize::MAX)),
        }
    }

    /// Pages that one request of `--max-model-len` needs, most of which it may hold while its prompt is computed.
    pub(crate) fn request_pages(&self) -> usize {
        let StepLimits {
            max_num_batched_tokens,
            max_model_len,
            ..
        } = self.limits;
        self.kv(0).request_pages(max_model_len, max_num_batched_tokens)
    }

    /// Bytes of one page, as declared.
    pub fn page_bytes(&self) -> u64 {
        let columns = self.groups.columns_per_page() as u64;
        columns * self.column_bytes_per_token() * self.block_size.tokens() as u64
    }

    /// Bytes that a token takes in one column of a page.
    pub(crate) fn column_bytes_per_token(&self) -> u64 {
        let columns: usize = self.groups.iter().map(|group| group.columns).sum();
        self.kv_bytes_per_token / columns as u64
    }
}

/// Most tokens or requests in one step: beyond any device, and a step that a host can still describe.
pub const MAX_STEP: usize = 1 << 22;

/// Most tokens of one request: beyond any device, and sums of such numbers cannot overflow.
pub const MAX_TOKENS: usize = 1 << 32;

/// Least tokens of the probe's KV cache.
const PROBE_TOKENS: usize = 8192;

/// Who decides the size of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvSize {
    /// The profile: as much as is proved to fit.
    #[default]
    Auto,
    /// `--max-total-token-num`: this many tokens, proved to fit or refused.
    Tokens(usize),
    /// `--kv-cache-memory-bytes`: this many bytes, proved to fit or refused.
    Bytes(u64),
}

/// `--mem-fraction`: multiplies the room for KV only, not the device's total.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct MemFraction(f64);

impl MemFraction {
    /// `None` unless `fraction` is above 0 and at most 1.
    pub fn new(fraction: f64) -> Option<Self> {
        (fraction > 0.0 && fraction <= 1.0).then_some(Self(fraction))
    }

    /// The number.
    pub fn get(self) -> f64 {
        self.0
    }
}

impl Default for MemFraction {
    fn default() -> Self {
        Self(0.95)
    }
}

/// Bytes kept free of KV. Smaller ones suit small budgets, where the defaults would be most of the memory; the report says
/// which were used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Margins {
    /// Held while a size is proved, then freed: really free when serving starts.
    pub canary_bytes: u64,
    /// Least allowance for what allocators hold without using it.
    pub min_fragmentation_bytes: u64,
}

/// Canary of a device: 256 MiB.
pub const CANARY_BYTES: u64 = 256 << 20;

/// Least fragmentation buffer of a device: 150 MiB. The buffer is the larger of this and twice the measured fragmentation.
pub const MIN_FRAGMENTATION_BYTES: u64 = 150 << 20;

impl Default for Margins {
    fn default() -> Self {
        Self {
            canary_bytes: CANARY_BYTES,
            min_fragmentation_bytes: MIN_FRAGMENTATION_BYTES,
        }
    }
}

impl Margins {
    /// The defaults, or in their proportion less: together at most an eighth of a device of `total` bytes.
    pub fn scaled_to(total: u64) -> Self {
        let full = Self::default();
        let sum = full.canary_bytes + full.min_fragmentation_bytes;
        let scale = |bytes: u64| {
            let scaled = u128::from(bytes) * u128::from(total / 8) / u128::from(sum);
            bytes.min(u64::try_from(scaled).unwrap_or(u64::MAX))
        };
        Self {
            canary_bytes: scale(full.canary_bytes),
            min_fragmentation_bytes: scale(full.min_fragmentation_bytes),
        }
    }

    /// What is set aside for a measured `fragmentation`.
    pub fn fragmentation_buffer(&self, fragmentation: u64) -> u64 {
        self.min_fragmentation_bytes.max(fragmentation.saturating_mul(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(batched: usize, seqs: usize, model_len: usize) -> ProfileSpec {
        let limits = StepLimits {
            max_num_batched_tokens: batched,
            max_num_seqs: seqs,
            max_model_len: model_len,
        };
        ProfileSpec::new(limits, 100, BlockSize::default(), 1)
    }

    #[test]
    fn the_probe_holds_the_largest_step_whatever_the_context() {
        assert_eq!(spec(512, 64, 2048).probe_tokens(), 8192);
        assert_eq!(spec(512, 64, 1 << 20).probe_tokens(), 8192);
        assert_eq!(spec(16384, 4, 2048).probe_tokens(), 16384 + 8 * 16);
        // 1024 rows write to 1024 blocks and more.
        assert_eq!(spec(2048, 1024, 2048).probe_tokens(), 2048 + 2048 * 16);
    }

    #[test]
    fn a_limit_beyond_any_device_is_named() {
        let (step, most) = (MAX_STEP, MAX_TOKENS);
        spec(step, step, most).check().unwrap();
        assert!(spec(step, step, most).probe_tokens() > step);
        let cases = [
            (spec(step + 1, 1, 1), "--max-num-batched-tokens", step),
            (spec(usize::MAX, 1, 1), "--max-num-batched-tokens", step),
            (spec(1, usize::MAX, 1), "--max-num-seqs", step),
            (spec(1, 1, usize::MAX), "--max-model-len", most),
        ];
        for (spec, flag, most) in cases {
            let error = spec.check().unwrap_err().to_string();
            assert!(
                error.contains(flag) && error.contains(&most.to_string()),
                "{error}"
            );
        }
    }

    #[test]
    fn the_fraction_is_at_most_one() {
        assert_eq!(MemFraction::default().get(), 0.95);
        assert!(MemFraction::new(1.0).is_some());
        for wrong in [0.0, -0.5, 1.01, f64::NAN, f64::INFINITY] {
            assert_eq!(MemFraction::new(wrong), None);
        }
    }

    #[test]
    fn the_buffer_is_150_mib_or_twice_the_fragmentation() {
        let margins = Margins::default();
        assert_eq!(margins.fragmentation_buffer(0), 150 << 20);
        assert_eq!(margins.fragmentation_buffer(75 << 20), 150 << 20);
        assert_eq!(margins.fragmentation_buffer(100 << 20), 200 << 20);
        assert_eq!(margins.fragmentation_buffer(u64::MAX), u64::MAX);
    }

    #[test]
    fn small_devices_have_small_margins() {
        assert_eq!(Margins::scaled_to(8 << 30), Margins::default());
        assert_eq!(Margins::scaled_to(u64::MAX), Margins::default());
        let small = Margins::scaled_to(800 << 20);
        assert!(small.canary_bytes + small.min_fragmentation_bytes <= 100 << 20);
        assert!(small.canary_bytes > 60 << 20 && small.min_fragmentation_bytes > 36 << 20);
        assert_eq!(Margins::scaled_to(0).canary_bytes, 0);
    }
}
