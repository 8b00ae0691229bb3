//! What is asked of the auto-profile: the flags, over what suits the device.

use plimsoll_core::{CacheGroups, Pooling, StepLimits};
use plimsoll_profiler::{KvSize, MAX_STEP, MAX_TOKENS, Margins, ProfileSpec};

use super::weights::Defaults;
use crate::args::EngineArgs;
use crate::bytes::Bytes;
use crate::error::Error;

/// A KV cache of more tokens than this is of no use at the speed of a CPU, but would take the machine's memory from
/// everybody else. `--max-total-token-num` may ask for more.
const USEFUL_TOKENS: usize = 1 << 17;

pub(super) fn step_limits(
    args: &EngineArgs,
    trained_for: usize,
    defaults: Defaults,
) -> Result<StepLimits, Error> {
    let limits = &args.limits;
    let max_num_seqs = limits.max_num_seqs.unwrap_or(defaults.max_num_seqs);
    let max_num_seqs = max_num_seqs.max(limits.least_num_seqs);
    let max_num_batched_tokens = limits
        .max_num_batched_tokens
        .unwrap_or(defaults.max_num_batched_tokens);
    let max_model_len = limits.max_model_len.unwrap_or(trained_for);
    for (flag, value, most) in [
        ("--max-model-len", max_model_len, MAX_TOKENS),
        ("--max-num-seqs", max_num_seqs, MAX_STEP),
        ("--max-num-batched-tokens", max_num_batched_tokens, MAX_STEP),
    ] {
        if value > most {
            return Err(Error::Configuration {
                origin: flag.to_owned(),
                message: format!("{value} is more than any device holds; give at most {most}"),
            });
        }
    }
    if max_model_len > trained_for {
        let message =
            format!("the model was made for at most {trained_for} tokens, {max_model_len} were asked for");
        return Err(Error::Configuration {
            origin: "--max-model-len".to_owned(),
            message,
        });
    }
    if max_num_batched_tokens < max_num_seqs {
        let message = format!(
            "{max_num_batched_tokens} tokens per step cannot hold one of each of {max_num_seqs} requests; raise it or \
             lower --max-num-seqs"
        );
        return Err(Error::Configuration {
            origin: "--max-num-batched-tokens".to_owned(),
            message,
        });
    }
    Ok(StepLimits {
        max_num_batched_tokens,
        max_num_seqs,
        max_model_len,
    })
}

/// What the profile has to find a size for, apart from the flags.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject {
    pub(super) limits: StepLimits,
    pub(super) vocab_size: usize,
    /// How rows are pooled, if it is served for embeddings.
    pub(super) pooling: Option<Pooling>,
    /// How its KV cache is cut.
    pub(super) groups: CacheGroups,
    pub(super) kv_bytes_per_token: u64,
    /// Bytes of the device, as far as they are granted.
    pub(super) total: u64,
    /// It is a GPU, whose memory nobody else has a use for.
    pub(super) is_gpu: bool,
    /// Most bytes that could be granted, where that is known.
    pub(super) largest: Option<u64>,
}

pub(super) fn profile_spec(subject: &Subject, args: &EngineArgs) -> ProfileSpec {
    let limits = subject.limits;
    let mut spec = ProfileSpec::new(
        limits,
        subject.vocab_size,
        args.limits.block_size,
        subject.kv_bytes_per_token,
    );
    spec.groups = subject.groups;
    spec.pooling = subject.pooling;
    spec.margins = Margins::scaled_to(subject.total);
    spec.mem_fraction = args.memory.mem_fraction;
    spec.size = match (args.memory.max_total_token_num, args.memory.kv_cache_memory_bytes) {
        (Some(tokens), _) => KvSize::Tokens(tokens),
        (None, Some(Bytes(bytes))) => KvSize::Bytes(bytes),
        (None, None) => KvSize::Auto,
    };
    spec.largest_device = subject.largest;
    // A prefix cache is never too large.
    if !subject.is_gpu {
        let useful = limits.max_num_seqs.saturating_mul(limits.max_model_len);
        spec.useful_tokens = Some(useful.min(USEFUL_TOKENS.max(limits.max_model_len)));
    }
    spec
}
