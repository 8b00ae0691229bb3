//! What is asked of the auto-profile: the flags, over what suits the device.

use plimsoll_core::StepLimits;
use plimsoll_profiler::{MAX_STEP, MAX_TOKENS, Margins, ProfileSpec, state_slots};

use crate::backend::{Device, ModelFacts};
use crate::bytes::Bytes;
use crate::error::Error;
use crate::settings::EngineSettings;

/// What is asked of a state beside its size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// The largest step.
    pub(super) step: StepLimits,
    /// As [`ProfileSpec::most_state_slots`].
    pub(super) most_state_slots: usize,
}

/// From the flags, or what suits the device and the model.
///
/// # Errors
/// Where the model's configuration cannot be read, or limits do not go together.
pub(super) fn limits(settings: &EngineSettings, device: &dyn Device) -> Result<Limits, Error> {
    let (defaults, trained_for) = (device.defaults(), device.max_model_len()?);
    let max_num_batched_tokens = settings
        .max_num_batched_tokens
        .unwrap_or(defaults.max_num_batched_tokens);
    let rows_at_once = device.tokens_at_once()?;
    let state_chunk = state_chunk(device, device.state_layers()?);
    // A step has room for a token of each other request beside the tokens of a prompt that must be computed in one step.
    let most_seqs = max_num_batched_tokens
        .saturating_add(1)
        .saturating_sub(rows_at_once.max(state_chunk));
    let fitting = defaults.max_num_seqs.min(most_seqs.max(1));
    let max_num_seqs = settings.max_num_seqs.unwrap_or(fitting);
    let max_num_seqs = max_num_seqs.max(settings.least_num_seqs);
    let max_model_len = settings.max_model_len.unwrap_or(trained_for);
    for (flag, value, most) in [
        ("--max-model-len", max_model_len, MAX_TOKENS),
        ("--max-num-seqs", max_num_seqs, MAX_STEP),
        ("--max-num-batched-tokens", max_num_batched_tokens, MAX_STEP),
    ] {
        if value > most {
            let message = format!("{value} is more than any device has; the maximum is {most}");
            return Err(Error::configuration(flag, message));
        }
    }
    if max_model_len > trained_for {
        return Err(Error::ContextTooLong {
            asked: max_model_len,
            trained_for,
        });
    }
    if max_num_batched_tokens < max_num_seqs {
        let message = format!(
            "{max_num_batched_tokens} tokens per step cannot hold one of each of {max_num_seqs} requests; raise it or \
             lower --max-num-seqs"
        );
        return Err(Error::configuration("--max-num-batched-tokens", message));
    }
    if max_num_seqs > most_seqs {
        let (what, or) = match rows_at_once > state_chunk {
            true => (
                format!("the {rows_at_once} of an image, which see each other,"),
                ", or serve text alone: --limit-mm-per-prompt '{\"image\": 0}'",
            ),
            false => (
                format!("{state_chunk} of a prompt, whose states are computed together,"),
                "",
            ),
        };
        let least = max_num_seqs - 1 + rows_at_once.max(state_chunk);
        let message = format!(
            "{max_num_batched_tokens} tokens per step cannot hold {what} beside one of each other request that may run \
             (--max-num-seqs {max_num_seqs}); use at least {least} or lower --max-num-seqs{or}"
        );
        return Err(Error::configuration("--max-num-batched-tokens", message));
    }
    let limits = Limits {
        step: StepLimits {
            max_num_batched_tokens,
            max_num_seqs,
            max_model_len,
        },
        most_state_slots: usize::MAX,
    };
    match device.state_layers()? {
        0 => Ok(limits),
        _ => with_states(settings, device, limits),
    }
}

/// Tokens of a request on average where nobody says.
const MEAN_REQUEST_LEN: usize = 8192;

/// The limits with as many state slots as leave enough KV, and by default no more requests at once than slots.
fn with_states(settings: &EngineSettings, device: &dyn Device, limits: Limits) -> Result<Limits, Error> {
    let (facts, footprint) = device.footprint(limits.step)?;
    let spec = profile_spec(settings, device, limits, &facts, footprint.idle().total);
    let mean = settings.mean_request_len.unwrap_or(MEAN_REQUEST_LEN);
    let slots = state_slots(&spec, &*footprint, mean.min(limits.step.max_model_len));
    let max_num_seqs = match settings.max_num_seqs {
        Some(_) => limits.step.max_num_seqs,
        None => limits.step.max_num_seqs.min(slots).max(settings.least_num_seqs),
    };
    let limits = Limits {
        step: StepLimits {
            max_num_seqs,
            ..limits.step
        },
        most_state_slots: slots,
    };
    tracing::info!(
        "{max_num_seqs} requests at once (--max-num-seqs); {} slots for states of {} each (--mean-request-len)",
        facts
            .groups
            .state_slots(max_num_seqs, slots, facts.shares_prefixes(settings)),
        Bytes(facts.state_bytes)
    );
    Ok(limits)
}

/// Tokens of a prompt for which states are computed together; 1 without any.
fn state_chunk(device: &dyn Device, state_layers: usize) -> usize {
    match state_layers {
        0 => 1,
        _ => device.state_chunk(),
    }
}

/// For a device of `total` bytes.
pub(super) fn profile_spec(
    settings: &EngineSettings,
    device: &dyn Device,
    limits: Limits,
    facts: &ModelFacts,
    total: u64,
) -> ProfileSpec {
    let Limits {
        step: limits,
        most_state_slots,
    } = limits;
    let mut spec = ProfileSpec::new(
        limits,
        facts.vocab_size,
        settings.block_size,
        facts.kv_bytes_per_token,
    );
    spec.groups = facts.groups;
    spec.state_bytes = facts.state_bytes;
    spec.prefix_caching = facts.shares_prefixes(settings);
    spec.most_state_slots = most_state_slots;
    spec.pooling = facts.pooling();
    spec.quantization.clone_from(&facts.quantization);
    spec.num_parameters = facts.num_parameters_of_rank;
    let state_chunk = state_chunk(device, facts.groups.state_layers());
    spec.tokens_at_once = facts
        .images
        .map_or(state_chunk, |input| input.tokens_at_once().max(state_chunk));
    spec.margins = Margins::scaled_to(total);
    spec.mem_fraction = settings.mem_fraction;
    spec.size = settings.kv_size;
    spec.largest_device = device.largest();
    spec.useful_tokens = device.defaults().useful_tokens.map(|useful| {
        let most = limits.max_num_seqs.saturating_mul(limits.max_model_len);
        match settings.fills_memory {
            true => most,
            false => most.min(useful.max(limits.max_model_len)),
        }
    });
    spec
}
