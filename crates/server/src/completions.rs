//! `/v1/completions`.

use std::ops::Range;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use plimsoll_core::{Logprobs, PromptLogprob, SamplingParams, TokenId};
use plimsoll_text::{Detokenizer, Tokenizer};
use serde_json::{Map, json};

use crate::blocking::blocking;
use crate::body::Body;
use crate::context::Context;
use crate::error::ApiError;
use crate::generate::{Output, TokenLogprobs, collect, merge, submit};
use crate::job::{AnswerLength, Choices, Job, Parameters};
use crate::openapi::Errors;
use crate::prompt::{self, Middle};
use crate::respond::{EventFormat, FINGERPRINT, Identity, SseEvent, data, done, stream};
use crate::scores;
use crate::state::AppState;
use crate::structured;
use crate::wire::common::{MaxTokens, MaybeUsage, Usage, UsageIn, finish_reason};
use crate::wire::completion::{Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Prompt};

const PROMPT: &str = "prompt";
/// OpenAI's default of `max_tokens` for completions.
const DEFAULT_MAX_TOKENS: usize = 16;
/// `max_tokens` of a request that generates nothing.
const NOTHING: Option<MaxTokens> = Some(MaxTokens::AtMost(0));

/// Completions
///
/// Continues a prompt; the text comes whole or as server-sent events. The data of each event is one chunk, that of the last
/// is `[DONE]`.
#[utoipa::path(
    post, path = "/v1/completions", tag = "Generation", operation_id = "createCompletion",
    request_body(content = CompletionRequest, examples(
        ("A text" = (value = json!({ "prompt": "A load line is", "max_tokens": 32 }))),
        ("Two at once" = (value = json!({ "prompt": ["A load line is", "A Plimsoll mark is"], "max_tokens": 32 }))),
    )),
    responses(
        (status = 200, description = "The text.",
            content((Completion = "application/json"), (Completion = "text/event-stream"))),
        Errors,
    )
)]
pub(crate) async fn handle(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Body(request): Body<CompletionRequest>,
) -> Result<Response, ApiError> {
    let CompletionRequest {
        common,
        structured,
        own,
    } = request;
    state.check_model(common.model.as_deref())?;
    let usage_in = common.usage_in(state.options().force_include_usage)?;
    let (echo, logprobs) = (own.echo, own.logprobs);
    if let Some(top) = logprobs.filter(|&top| top > SamplingParams::MAX_LOGPROBS) {
        let most = SamplingParams::MAX_LOGPROBS;
        let message = format!("logprobs must be at most {most}, not {top}");
        return Err(ApiError::invalid("logprobs", message));
    }
    let wanted = common.n()?;
    let n = match own.best_of {
        Some(best_of) => check_best_of(best_of, wanted, common.stream)?,
        None => wanted,
    };
    let scores_prompt = echo && (logprobs.is_some() || common.max_tokens == NOTHING);
    let choices = Choices {
        n,
        // The best of several are chosen by their log-probabilities.
        logprobs: logprobs.or((n > wanted).then_some(0)),
        prompt_logprobs: match scores_prompt {
            true => common.prompt_logprobs()?.max(logprobs.or(Some(0))),
            false => common.prompt_logprobs()?,
        },
        prompt_field: PROMPT,
    };
    let mut parameters = Parameters::new(&state, &context, &common, choices)?;
    let middle = middle(&state, own.suffix, echo, parameters.truncates_prompts())?;
    if let Some(middle) = middle.as_ref().filter(|_| !common.ignore_eos) {
        parameters.end_with(middle.fim.ends());
    }
    let grammar = structured::compile(&state, structured.grammar()?).await?;
    if common.max_tokens == NOTHING && !echo {
        let message = "max_tokens must be at least 1, unless the prompt is echoed";
        return Err(ApiError::invalid("max_tokens", message));
    }
    let prompts = own.prompt.into_vec();
    if prompts.is_empty() {
        return Err(ApiError::invalid(PROMPT, "prompt must not be empty"));
    }
    parameters.check_count(&state, prompts.len())?;
    let model = Arc::clone(state.model());
    let limit = state.engine().limits().max_request_tokens();
    let most = (!parameters.truncates_prompts()).then_some(limit);
    let (prompts, tokens) = blocking(move || {
        let add_special = own.add_special_tokens.unwrap_or(true);
        let tokens = prompts.iter().enumerate().map(|(index, prompt)| {
            let tokens = match &middle {
                Some(middle) => middle.completion(&model, prompt, add_special, limit),
                None => prompt::completion(&model, prompt, add_special, most),
            };
            tokens.map_err(|error| error.of_prompt(PROMPT, index, prompts.len()))
        });
        let tokens = tokens.collect::<Result<Vec<_>, _>>()?;
        Ok((prompts, tokens))
    })
    .await?;
    let lengths: Vec<usize> = tokens.iter().map(Vec::len).collect();
    let length = AnswerLength {
        asked: common.max_tokens,
        field: "max_tokens",
        default: Some(DEFAULT_MAX_TOKENS),
        shrinks: false,
        reserved: match common.max_tokens {
            None => DEFAULT_MAX_TOKENS,
            Some(asked) => asked.limit().unwrap_or(1),
        },
    };
    let shown = Arc::default();
    let job = Job::new(&state, &context, parameters, tokens, length, grammar, shown)?;

    let tokenizer = state.model().tokenizer.clone();
    let reports = &common.reports;
    let skip_special = common.extra.skip_special_tokens.unwrap_or(true);
    let parts = prompts.into_iter().zip(lengths).zip(job.prompts());
    let begin = parts.map(|((prompt, len), tokens)| {
        let given = match prompt {
            Prompt::Text(text) if tokens.len() == len => Some(text),
            _ => None,
        };
        Arc::new(Begin {
            given: given
                .as_deref()
                .and_then(|text| given_tokens(&tokenizer, text, tokens)),
            echo: echo.then(|| given.unwrap_or_else(|| tokenizer.decode(tokens, skip_special))),
            tokens: tokens.to_vec(),
        })
    });
    let writer = CompletionWriter {
        identity: Identity::new("cmpl", &state, &context),
        begin: begin.flat_map(|begin| vec![Some(begin); n]).collect(),
        offsets: vec![Offset::generated(&tokenizer); job.requests.len()],
        tokenizer,
        logprobs: logprobs.map(|top| top as usize),
        prompt_logprobs: reports.prompt_logprobs.map(|top| top as usize),
        skip_special,
        names_are_ids: reports.return_tokens_as_token_ids || state.options().return_tokens_as_token_ids,
        token_ids: reports.return_token_ids,
        usage_in,
        usage: Usage::default(),
    };
    let choices = submit(&state, &context, job)?;
    if common.stream {
        let outputs = merge(choices);
        return Ok(stream(&state, &context, outputs, writer));
    }
    let outputs = best(collect(choices).await?, n, wanted);
    Ok(Json(writer.whole(outputs)).into_response())
}

/// What a `suffix` asks for, if there is one.
fn middle(
    state: &AppState,
    suffix: Option<String>,
    echo: bool,
    truncates: bool,
) -> Result<Option<Middle>, ApiError> {
    let Some(suffix) = suffix.filter(|suffix| !suffix.is_empty()) else {
        return Ok(None);
    };
    let Some(fim) = state.fim().cloned() else {
        let hint = "this model has no tokens for fill-in-the-middle, such as <|fim_prefix|>; put all text into `prompt`";
        return Err(ApiError::unsupported("suffix", hint));
    };
    for (field, is_set) in [("echo", echo), ("truncate_prompt_tokens", truncates)] {
        if is_set {
            let message = format!("{field} is not available with a suffix");
            return Err(ApiError::invalid(field, message));
        }
    }
    Ok(Some(Middle { fim, suffix }))
}

/// Where among the tokens of an echoed prompt those of its text are: the tokenizer may have added special tokens. `None` if there
/// are no special tokens.
fn given_tokens(tokenizer: &Tokenizer, text: &str, tokens: &[TokenId]) -> Option<Range<usize>> {
    if !tokens.iter().any(|&token| tokenizer.is_special(token)) {
        return None;
    }
    let given = tokenizer.encode(text, false).ok()?;
    let from = (0..tokens.len()).find(|&at| tokens[at..].starts_with(&given))?;
    Some(from..from + given.len())
}

/// How many choices per prompt are generated so that the best `n` can be returned.
fn check_best_of(best_of: usize, n: usize, stream: bool) -> Result<usize, ApiError> {
    let message = if !(n..=MAX_BEST_OF).contains(&best_of) {
        format!("best_of must be between n, which is {n}, and {MAX_BEST_OF}, not {best_of}")
    } else if stream && best_of > n {
        "best_of is not available with stream = true".to_owned()
    } else {
        return Ok(best_of);
    };
    Err(ApiError::invalid("best_of", message))
}

/// As for choices.
const MAX_BEST_OF: usize = 128;

/// The best `n` choices of each prompt by log-probability per token, as OpenAI ranks them. The usage includes the others.
fn best(mut outputs: Vec<Output>, best_of: usize, n: usize) -> Vec<Output> {
    if best_of == n {
        return outputs;
    }
    let mean = |output: &Output| {
        let logprobs = output
            .logprobs
            .iter()
            .map(|token| f64::from(token.logprobs.sampled));
        logprobs.sum::<f64>() / output.logprobs.len().max(1) as f64
    };
    let mut kept = Vec::with_capacity(outputs.len() / best_of * n);
    for of_prompt in outputs.chunks_mut(best_of) {
        let usages = of_prompt
            .iter_mut()
            .map(|output| std::mem::take(&mut output.usage));
        let all = usages.fold(Usage::default(), |sum, usage| sum.plus(&usage));
        // Stable: ties keep their order.
        of_prompt.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        of_prompt[0].usage = all;
        kept.extend(of_prompt[..n].iter_mut().map(std::mem::take));
    }
    kept
}

/// What precedes the generated text of a prompt's choices.
struct Begin {
    /// The prompt's text, if it is echoed.
    echo: Option<String>,
    /// Which tokens a text was turned into, special ones among them: these are in the echoed text.
    given: Option<Range<usize>>,
    /// The prompt's tokens.
    tokens: Vec<TokenId>,
}

/// Where a choice's next token begins in its text. A token within a character begins where the character does.
#[derive(Clone, Debug)]
struct Offset {
    /// Complete characters so far.
    characters: usize,
    detokenizer: Detokenizer,
}

impl Offset {
    /// At the beginning of generated text.
    fn generated(tokenizer: &Tokenizer) -> Self {
        Self {
            characters: 0,
            detokenizer: tokenizer.detokenizer(false).continuing(),
        }
    }

    fn push(&mut self, token: TokenId) {
        self.characters += self.detokenizer.push(token).chars().count();
    }

    /// Ends the echoed prompt, which the output follows.
    fn flush(&mut self) {
        self.characters += self.detokenizer.flush().chars().count();
    }
}

struct CompletionWriter {
    identity: Identity,
    tokenizer: Tokenizer,
    /// How many of the likeliest tokens to report for each token, if any.
    logprobs: Option<usize>,
    /// The same for the tokens of the prompt, in vLLM's format.
    prompt_logprobs: Option<usize>,
    skip_special: bool,
    names_are_ids: bool,
    token_ids: bool,
    usage_in: UsageIn,
    /// Of the choices that ended.
    usage: Usage,
    /// How far the listed tokens of each choice are, for `text_offset`.
    offsets: Vec<Offset>,
    /// For each choice, until its first text.
    begin: Vec<Option<Arc<Begin>>>,
}

impl CompletionWriter {
    fn completion(&self, choices: Vec<CompletionChoice>, usage: MaybeUsage) -> Completion {
        Completion {
            id: self.identity.id.clone(),
            object: "text_completion",
            created: self.identity.created,
            model: self.identity.model.clone(),
            choices,
            usage,
            system_fingerprint: FINGERPRINT,
        }
    }

    /// The response to a request that is not streamed; `outputs` are the whole choices in order.
    fn whole(mut self, outputs: Vec<Output>) -> Completion {
        let usages = outputs.iter().map(|output| &output.usage);
        let usage = usages.fold(Usage::default(), |sum, usage| sum.plus(usage));
        let choices = outputs
            .into_iter()
            .enumerate()
            .map(|(index, output)| CompletionChoice {
                index,
                ..self.choice(output)
            });
        let choices = choices.collect();
        self.completion(choices, Some(Some(usage)))
    }

    fn choice(&mut self, output: Output) -> CompletionChoice {
        let index = output.index;
        let begin = self.begin[index].take();
        let mut listed = CompletionLogprobs::default();
        if let Some(begin) = begin.as_ref().filter(|begin| begin.echo.is_some())
            && self.logprobs.is_some()
        {
            self.list_prompt(&mut listed, index, begin, &output.prompt);
        }
        for TokenLogprobs { token, logprobs } in output.logprobs {
            let is_text = self.is_text(token);
            self.list(&mut listed, index, token, is_text, Some(logprobs));
        }
        let reported = self.prompt_logprobs.filter(|_| begin.is_some());
        let echo = begin.as_ref().and_then(|begin| begin.echo.clone());
        let prompt_tokens = begin.filter(|_| self.token_ids);
        CompletionChoice {
            index,
            text: echo.unwrap_or_default() + &output.text,
            logprobs: self.logprobs.is_some().then_some(listed),
            finish_reason: output.finish.map(finish_reason),
            stop_reason: output.finish.map(|_| output.stop),
            prompt_logprobs: reported
                .map(|top| scores::prompt_logprobs(&output.prompt, top, &self.tokenizer)),
            prompt_token_ids: prompt_tokens.map(|begin| begin.tokens.clone()),
            token_ids: self.token_ids.then_some(output.tokens),
        }
    }

    /// Adds an echoed prompt. Its first token has no log-probability.
    fn list_prompt(
        &mut self,
        out: &mut CompletionLogprobs,
        index: usize,
        begin: &Begin,
        scored: &[PromptLogprob],
    ) {
        let known = scored.iter().map(|scored| {
            Some(Logprobs {
                sampled: scored.logprob,
                top: scored.top.clone(),
            })
        });
        let listed = begin.tokens.iter().zip(std::iter::once(None).chain(known));
        let generated = std::mem::replace(
            &mut self.offsets[index].detokenizer,
            self.tokenizer.detokenizer(false),
        );
        for (at, (&token, logprobs)) in listed.enumerate() {
            let is_text = match &begin.given {
                Some(given) => given.contains(&at),
                None => self.is_text(token),
            };
            self.list(out, index, token, is_text, logprobs);
        }
        self.offsets[index].flush();
        self.offsets[index].detokenizer = generated;
    }

    /// Whether generated text has the text of `token`.
    fn is_text(&self, token: TokenId) -> bool {
        !(self.skip_special && self.tokenizer.is_special(token))
    }

    fn list(
        &mut self,
        out: &mut CompletionLogprobs,
        index: usize,
        token: TokenId,
        is_text: bool,
        logprobs: Option<Logprobs>,
    ) {
        out.text_offset.push(self.offsets[index].characters);
        out.tokens.push(self.name(token));
        out.token_logprobs
            .push(logprobs.as_ref().map(|logprobs| scores::number(logprobs.sampled)));
        out.top_logprobs.push(logprobs.map(|logprobs| {
            let mut by_name = Map::new();
            let top = logprobs.top.iter().take(self.logprobs.unwrap_or(0));
            let top = top.map(|top| (top.token, top.logprob));
            for (token, logprob) in top.chain([(token, logprobs.sampled)]) {
                let named = by_name.entry(self.name(token));
                named.or_insert(json!(scores::number(logprob)));
            }
            by_name
        }));
        if is_text {
            self.offsets[index].push(token);
        }
    }

    /// A token's name as a key of `top_logprobs`. Tokens that are not valid UTF-8 are named by their bytes, as OpenAI does, so
    /// that names are unique.
    fn name(&self, token: TokenId) -> String {
        if self.names_are_ids {
            return scores::token_id(token);
        }
        let bytes = self.tokenizer.token_bytes(token);
        match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => {
                let bytes = bytes.iter().map(|byte| format!("\\x{byte:02x}"));
                format!("bytes:{}", bytes.collect::<String>())
            }
        }
    }
}

impl EventFormat for CompletionWriter {
    type Item = Output;

    fn item(&mut self, output: Output) -> Vec<SseEvent> {
        self.usage = self.usage.plus(&output.usage);
        let usage = self.usage_in.chunk(output.so_far);
        let choice = self.choice(output);
        vec![data(&self.completion(vec![choice], usage))]
    }

    fn end(&mut self) -> Vec<SseEvent> {
        let usage = Some(Some(self.usage));
        let usage = self
            .usage_in
            .last
            .then(|| data(&self.completion(Vec::new(), usage)));
        usage.into_iter().chain([done()]).collect()
    }
}
