//! Generation jobs: what a request asks for, checked against the model and the engine's limits.

use std::sync::Arc;
use std::time::Instant;

use plimsoll_core::{Bans, ImageSpan, Request, RequestOptions, SamplingOptions, TokenId};
use plimsoll_text::grammar::{CompiledGrammar, ReasoningBudget};
use plimsoll_text::{StopMatcher, Tokenizer};

use crate::context::Context;
use crate::error::ApiError;
use crate::model::GenerationDefaults;
use crate::record::Generation;
use crate::request_memory::Reservation;
use crate::state::AppState;
use crate::wire::common::{Common, MaxTokens};
use crate::wire::extra::{Extra, TruncationSide};

/// What an endpoint adds to the common fields.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choices {
    /// Choices to generate for each prompt.
    pub(crate) n: usize,
    /// How many of the likeliest tokens to report for each token, if log-probabilities are wanted.
    pub(crate) logprobs: Option<u32>,
    /// The same for the tokens of the prompt.
    pub(crate) prompt_logprobs: Option<u32>,
    /// The API field that holds the prompt, for errors.
    pub(crate) prompt_field: &'static str,
}

/// Everything about a job but its prompts. Checked first: rendering and tokenizing may take long.
#[derive(Debug)]
pub(crate) struct Parameters {
    choices: Choices,
    sampling: SamplingOptions,
    seed: u64,
    stopping: Stopping,
    stop_token_ids: Vec<TokenId>,
    priority: i64,
    deadline: Option<Instant>,
    bans: Bans,
    cache_salt: Option<Arc<str>>,
    truncate_prompt_tokens: Option<i64>,
    truncation_side: TruncationSide,
    reasoning: Option<ReasoningBudget>,
    images: Vec<ImageSpan>,
    image_memory: Option<Reservation>,
}

/// How a choice's text ends.
#[derive(Clone, Debug)]
pub(crate) struct Stopping {
    pub(crate) matcher: StopMatcher,
    pub(crate) strings: Arc<[String]>,
    /// The client's stop tokens, without end-of-sequence tokens.
    pub(crate) named_tokens: Arc<[TokenId]>,
    /// The text of the stop token is part of the answer.
    pub(crate) include_stop: bool,
    /// Stop strings are looked for after this many tokens.
    pub(crate) min_tokens: usize,
    pub(crate) skip_special: bool,
    /// Log-probabilities include that of a stop token that is not part of the text: there is one for each token id.
    pub(crate) scores_stop: bool,
}

impl Parameters {
    /// Checks the common fields, and names the request if the client does.
    pub(crate) fn new(
        state: &AppState,
        context: &Context,
        common: &Common,
        choices: Choices,
    ) -> Result<Self, ApiError> {
        state.check_generates()?;
        let model = state.model();
        let mut stop_token_ids = common.stop_token_ids()?;
        let vocab_size = state.engine().limits().vocab_size;
        if let Some(token) = stop_token_ids.iter().find(|&&token| token as usize >= vocab_size) {
            let message = format!("stop_token_ids: {token} is outside the vocabulary of {vocab_size} tokens");
            return Err(ApiError::invalid("stop_token_ids", message));
        }
        if let Some(id) = &common.request_id {
            context.name(id)?;
        }
        let is_end = |token: &TokenId| !common.ignore_eos && model.eos_token_ids.contains(token);
        let named_tokens = stop_token_ids
            .iter()
            .copied()
            .filter(|token| !is_end(token))
            .collect();
        if !common.ignore_eos {
            stop_token_ids.extend(&model.eos_token_ids);
        }
        // Each costs a comparison per token.
        stop_token_ids.sort_unstable();
        stop_token_ids.dedup();
        let extra = &common.extra;
        let bans = bans(extra, &model.tokenizer)?;
        let strings = common.stop()?;
        let matcher = StopMatcher::new(&strings, extra.include_stop_str_in_output)
            .map_err(|error| ApiError::invalid("stop", error.to_string()))?;
        if extra.cache_salt.as_deref() == Some("") {
            let message =
                "cache_salt must not be empty: leave it out to share the prefix cache with all requests";
            return Err(ApiError::invalid("cache_salt", message));
        }
        Ok(Self {
            choices,
            sampling: sampling(common, &model.defaults, choices.logprobs)?,
            seed: common.seed.map_or_else(|| state.draw_seed(), |seed| seed as u64),
            stopping: Stopping {
                matcher,
                strings: strings.into(),
                named_tokens,
                include_stop: extra.include_stop_str_in_output,
                min_tokens: bans.min_tokens,
                skip_special: extra.skip_special_tokens.unwrap_or(true),
                scores_stop: common.reports.return_token_ids,
            },
            stop_token_ids,
            priority: context.priority(common.priority(state.options().priorities)?),
            deadline: context.deadline(common.timeout()?),
            bans,
            cache_salt: context.cache_salt(extra.cache_salt.as_deref()),
            truncate_prompt_tokens: extra.truncate_prompt_tokens,
            truncation_side: extra.truncation_side.unwrap_or(TruncationSide::Left),
            reasoning: None,
            images: Vec::new(),
            image_memory: None,
        })
    }

    /// The images of the only prompt, and the memory that they take.
    pub(crate) fn show(&mut self, images: Vec<ImageSpan>, memory: Option<Reservation>) {
        (self.images, self.image_memory) = (images, memory);
    }

    /// Limits the tokens of reasoning.
    pub(crate) fn limit_reasoning(&mut self, budget: ReasoningBudget) {
        self.reasoning = Some(budget);
    }

    /// Whether the client requests truncation of long prompts.
    pub(crate) fn truncates_prompts(&self) -> bool {
        self.truncate_prompt_tokens.is_some()
    }

    /// Ends answers with these tokens too, which are no stop tokens of the client's.
    pub(crate) fn end_with(&mut self, tokens: &[TokenId]) {
        self.stop_token_ids.extend(tokens);
        self.stop_token_ids.sort_unstable();
        self.stop_token_ids.dedup();
    }

    /// Refuses more choices than the engine can hold, before their prompts cost anything.
    pub(crate) fn check_count(&self, state: &AppState, prompts: usize) -> Result<(), ApiError> {
        let (n, capacity) = (self.choices.n, state.engine().capacity());
        let choices = prompts.saturating_mul(n);
        if choices <= capacity {
            return Ok(());
        }
        let message = format!(
            "{prompts} prompts with n = {n} make {choices} sequences, but this server takes at most {capacity} at once"
        );
        let field = if n == 1 { self.choices.prompt_field } else { "n" };
        Err(ApiError::invalid(field, message))
    }

    /// Truncates prompts, if requested. `reserved`: tokens to leave for the answer.
    fn truncate(&self, prompts: &mut [Vec<TokenId>], limit: usize, reserved: usize) -> Result<(), ApiError> {
        let Some(asked) = self.truncate_prompt_tokens else {
            return Ok(());
        };
        let most = match usize::try_from(asked) {
            Ok(most) if (1..=limit).contains(&most) => most,
            _ if asked == -1 => limit.saturating_sub(reserved).max(1),
            _ => {
                let message = format!(
                    "truncate_prompt_tokens must be between 1 and {limit}, or -1 for as many as fit, not {asked}"
                );
                return Err(ApiError::invalid("truncate_prompt_tokens", message));
            }
        };
        for prompt in prompts {
            match self.truncation_side {
                TruncationSide::Left => drop(prompt.drain(..prompt.len().saturating_sub(most))),
                TruncationSide::Right => prompt.truncate(most),
            }
        }
        Ok(())
    }
}

/// How long answers may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnswerLength {
    /// What the client wants.
    pub(crate) asked: Option<MaxTokens>,
    /// The API field that says so, for errors.
    pub(crate) field: &'static str,
    /// Used if `asked` is absent, lowered to what fits. If both are absent, as many as fit.
    pub(crate) default: Option<usize>,
    /// Lower `asked` to what fits; otherwise a request that does not fit is refused.
    pub(crate) shrinks: bool,
    /// Tokens that truncated prompts leave for the answer.
    pub(crate) reserved: usize,
}

impl AnswerLength {
    /// Maximum tokens of an answer if `room` are left. At least 1: a prompt that does not fit is refused with all its numbers.
    fn max_tokens(self, room: usize) -> Option<usize> {
        let room = room.max(1);
        match self.asked {
            Some(MaxTokens::AtMost(most)) if self.shrinks => Some(most.min(room)),
            Some(asked) => asked.limit(),
            None => self.default.map(|default| default.min(room)),
        }
    }
}

/// A checked job: the engine can serve it to its end.
#[derive(Debug)]
pub(crate) struct Job {
    /// The choices of each prompt, prompt by prompt.
    pub(crate) requests: Vec<Request>,
    /// Choices per prompt.
    pub(crate) n: usize,
    pub(crate) stopping: Stopping,
    /// When it is cancelled.
    pub(crate) deadline: Option<Instant>,
    /// Special tokens that are read as text, where others are skipped.
    pub(crate) shown: Arc<[TokenId]>,
    /// For its record.
    pub(crate) generation: Generation,
    /// Memory of its images.
    pub(crate) image_memory: Option<Arc<Reservation>>,
}

impl Job {
    /// `grammar` is what each choice must follow, `shown` which special tokens are read as text.
    pub(crate) fn new(
        state: &AppState,
        context: &Context,
        parameters: Parameters,
        mut prompts: Vec<Vec<TokenId>>,
        length: AnswerLength,
        grammar: Option<CompiledGrammar>,
        shown: Arc<[TokenId]>,
    ) -> Result<Self, ApiError> {
        let (engine, limits) = (state.engine(), state.engine().limits());
        let limit = limits.max_request_tokens();
        parameters.truncate(&mut prompts, limit, length.reserved)?;
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let max_tokens = length.max_tokens(limit.saturating_sub(longest));
        let (sampling, choices) = (&parameters.sampling, parameters.choices);
        let (seed, stop_token_ids) = (parameters.seed, &parameters.stop_token_ids);
        let generation = Generation {
            model: state.model().id.clone(),
            max_tokens,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            prompt_tokens: prompts.iter().map(Vec::len).sum(),
            ..Default::default()
        };
        let mut requests = Vec::with_capacity(prompts.len() * choices.n);
        let count = prompts.len();
        for (index, prompt) in prompts.into_iter().enumerate() {
            let constraints = grammar.iter().map(|grammar| grammar.constraint(stop_token_ids));
            let constraints = constraints.chain(parameters.reasoning.iter().map(ReasoningBudget::constraint));
            let options = RequestOptions {
                prompt,
                max_tokens,
                sampling: sampling.clone(),
                seed,
                stop_token_ids: stop_token_ids.clone(),
                priority: parameters.priority,
                tenant: context.queued_as(),
                constraints: constraints.collect(),
                prompt_logprobs: choices.prompt_logprobs,
                bans: parameters.bans.clone(),
                cache_salt: parameters.cache_salt.clone(),
                images: parameters.images.clone(),
                pooling: None,
            };
            let first = Request::new(engine.next_id(), options, &limits)
                .map_err(|error| ApiError::from_request(error, choices.prompt_field, length.field))
                .map_err(|error| error.of_prompt(choices.prompt_field, index, count))?;
            let others: Vec<_> = (1..choices.n)
                .map(|i| first.again(engine.next_id(), seed.wrapping_add(i as u64)))
                .collect();
            requests.push(first);
            requests.extend(others);
        }
        Ok(Self {
            requests,
            n: choices.n,
            stopping: parameters.stopping,
            deadline: parameters.deadline,
            shown,
            generation,
            image_memory: parameters.image_memory.map(Arc::new),
        })
    }

    /// The tokens of each prompt.
    pub(crate) fn prompts(&self) -> impl Iterator<Item = &[TokenId]> {
        self.requests.iter().step_by(self.n).map(Request::prompt)
    }
}

/// Sampling parameters with the model's defaults where the client is silent.
fn sampling(
    common: &Common,
    defaults: &GenerationDefaults,
    logprobs: Option<u32>,
) -> Result<SamplingOptions, ApiError> {
    let mut logit_bias = Vec::new();
    for (token, &bias) in common.logit_bias.iter().flatten() {
        let token = token.parse().map_err(|_| {
            ApiError::invalid("logit_bias", format!("logit_bias: `{token}` is not a token id"))
        })?;
        logit_bias.push((token, bias));
    }
    Ok(SamplingOptions {
        temperature: common.temperature.or(defaults.temperature),
        top_p: common.top_p.or(defaults.top_p),
        top_k: common.top_k.or(defaults.top_k),
        min_p: common.min_p.or(defaults.min_p),
        presence_penalty: common.presence_penalty,
        frequency_penalty: common.frequency_penalty,
        repetition_penalty: common.repetition_penalty()?.or(defaults.repetition_penalty),
        logit_bias,
        logprobs,
    })
}

/// Most bad words, and bytes of each: every one costs a comparison per token.
const MAX_BAD_WORDS: usize = 256;
const MAX_BAD_WORD_BYTES: usize = 256;

/// Bad words are banned as they are tokenized at the start of a text and after a space.
fn bans(extra: &Extra, tokenizer: &Tokenizer) -> Result<Bans, ApiError> {
    let bad_words = extra.bad_words.as_deref().unwrap_or_default();
    let wrong = |message: String| Err(ApiError::invalid("bad_words", message));
    if bad_words.len() > MAX_BAD_WORDS {
        let len = bad_words.len();
        return wrong(format!(
            "at most {MAX_BAD_WORDS} bad_words are supported, not {len}"
        ));
    }
    let mut words = Vec::new();
    for word in bad_words.iter().map(|word| word.trim_start()) {
        if word.is_empty() || word.len() > MAX_BAD_WORD_BYTES {
            return wrong(format!("a bad word must have 1 to {MAX_BAD_WORD_BYTES} bytes"));
        }
        for text in [word.to_owned(), format!(" {word}")] {
            let tokens = tokenizer.encode_literal(&text)?;
            if !words.contains(&tokens) {
                words.push(tokens);
            }
        }
    }
    Ok(Bans {
        min_tokens: extra.min_tokens.unwrap_or(0),
        allowed: extra.allowed_token_ids.clone(),
        words: words.into(),
    })
}
