use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Instant;

use futures::{FutureExt, Stream, StreamExt, stream};
use plimsoll_core::{
    Bans, Constraint, Event, FinishReason, Logprobs, PromptEvent, PromptLogprob, Request, RequestOptions,
    SamplingOptions, StepError, TokenEvent, TokenId,
};
use plimsoll_engine::RequestStream;
use plimsoll_text::grammar::CompiledGrammar;
use plimsoll_text::{Detokenizer, StopMatcher, TextError, Tokenizer};
use tokio::time::timeout_at;

use crate::context::{Context, Generation};
use crate::error::ApiError;
use crate::metrics::Timer;
use crate::state::AppState;
use crate::wire::common::{Common, StopReason, Usage};
use crate::wire::extra::Extra;

/// What a client wants generated, whichever endpoint it came through.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) prompts: Vec<Vec<TokenId>>,
    /// Choices per prompt.
    pub(crate) n: usize,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) sampling: SamplingOptions,
    pub(crate) seed: u64,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_token_ids: Vec<TokenId>,
    /// Those of them that the client named, and are no end of text anyway.
    named_stops: Arc<[TokenId]>,
    /// What each choice must be.
    pub(crate) grammar: Option<CompiledGrammar>,
    /// Special tokens that are read as text, where others are skipped.
    pub(crate) shown: Arc<[TokenId]>,
    pub(crate) priority: i64,
    /// When it is given up.
    pub(crate) deadline: Option<Instant>,
    /// How many of the likeliest tokens to report at each place of the prompt, if its log-probabilities are wanted.
    pub(crate) prompt_logprobs: Option<u32>,
    bans: Bans,
    extra: Extra,
    /// The API field that holds the prompt, for errors.
    pub(crate) prompt_field: &'static str,
}

impl Job {
    /// The common fields of a request; `prompts` and `max_tokens` are the endpoint's.
    pub(crate) fn new(
        state: &AppState,
        common: &Common,
        logprobs: Option<u32>,
        prompt_field: &'static str,
    ) -> Result<Self, ApiError> {
        state.check_generates()?;
        let model = state.model();
        let mut stop_token_ids = common.stop_token_ids()?;
        let vocab_size = state.engine().limits().vocab_size;
        if let Some(token) = stop_token_ids.iter().find(|&&token| token as usize >= vocab_size) {
            let message = format!("stop_token_ids: {token} is outside the vocabulary of {vocab_size} tokens");
            return Err(ApiError::invalid("stop_token_ids", message));
        }
        common.name_request()?;
        let is_end = |token: &TokenId| !common.ignore_eos && model.eos_token_ids.contains(token);
        let named_stops = stop_token_ids
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
        Ok(Self {
            prompts: Vec::new(),
            n: common.n()?,
            max_tokens: common.max_tokens,
            sampling: common.sampling(&model.defaults, logprobs)?,
            seed: common.seed.map_or_else(|| state.draw_seed(), |seed| seed as u64),
            stop: common.stop()?,
            stop_token_ids,
            named_stops,
            grammar: None,
            shown: Arc::default(),
            priority: common.priority(state)?,
            deadline: Context::current().deadline(common.timeout()?),
            prompt_logprobs: common.prompt_logprobs()?,
            bans: bans(&common.extra, &model.tokenizer)?,
            extra: common.extra.clone(),
            prompt_field,
        })
    }

    /// What one choice must satisfy, at its beginning.
    fn constraints(&self) -> Vec<Box<dyn Constraint>> {
        let grammar = self.grammar.iter();
        grammar
            .map(|grammar| grammar.constraint(&self.stop_token_ids))
            .collect()
    }

    /// Whether the client has prompts cut that are too long.
    pub(crate) fn cuts_prompts(&self) -> bool {
        self.extra.truncate_prompt_tokens.is_some()
    }

    /// Sets the prompts, cut from the left to the length that the client wants.
    pub(crate) fn set_prompts(
        &mut self,
        state: &AppState,
        mut prompts: Vec<Vec<TokenId>>,
    ) -> Result<(), ApiError> {
        if let Some(asked) = self.extra.truncate_prompt_tokens {
            let limit = state.engine().limits().max_request_tokens();
            let most = match usize::try_from(asked) {
                Ok(most) if (1..=limit).contains(&most) => most,
                // As many as leave room for the answer.
                _ if asked == -1 => limit.saturating_sub(self.max_tokens.unwrap_or(1)).max(1),
                _ => {
                    let message = format!(
                        "truncate_prompt_tokens must be between 1 and {limit}, or -1 for as many as fit, not {asked}"
                    );
                    return Err(ApiError::invalid("truncate_prompt_tokens", message));
                }
            };
            for prompt in &mut prompts {
                prompt.drain(..prompt.len().saturating_sub(most));
            }
        }
        self.prompts = prompts;
        Ok(())
    }

    fn cache_salt(&self, context: &Context) -> Result<Option<Arc<str>>, ApiError> {
        match self.extra.cache_salt.as_deref() {
            Some("") => Err(ApiError::invalid(
                "cache_salt",
                "cache_salt must not be empty: leave it out to share the prefix cache with everybody",
            )),
            salt => Ok(context.cache_salt(salt)),
        }
    }

    /// Refuses more choices than the engine can hold, before their prompts cost anything.
    pub(crate) fn check_count(&self, state: &AppState, prompts: usize) -> Result<(), ApiError> {
        let (n, capacity) = (self.n, state.engine().capacity());
        let choices = prompts.saturating_mul(n);
        if choices <= capacity {
            return Ok(());
        }
        let message = format!(
            "{prompts} prompts with n = {n} make {choices} sequences, but this server takes at most {capacity} at once"
        );
        Err(ApiError::invalid("n", message))
    }

    /// Checks the job against the engine's limits and submits all its choices, or none: one that is refused cancels those
    /// before it. How many they are was checked before.
    pub(crate) fn submit(self, state: &AppState) -> Result<Vec<Choice>, ApiError> {
        let engine = state.engine();
        let context = Context::current();
        let cache_salt = self.cache_salt(&context)?;
        let mut requests = Vec::with_capacity(self.prompts.len() * self.n);
        for prompt in &self.prompts {
            let options = RequestOptions {
                prompt: prompt.clone(),
                max_tokens: self.max_tokens,
                sampling: self.sampling.clone(),
                seed: self.seed,
                stop_token_ids: self.stop_token_ids.clone(),
                priority: self.priority,
                tenant: context.tenant(),
                constraints: self.constraints(),
                prompt_logprobs: self.prompt_logprobs,
                bans: self.bans.clone(),
                cache_salt: cache_salt.clone(),
                pooling: None,
            };
            let first = Request::new(engine.next_id(), options, &engine.limits())
                .map_err(|error| ApiError::from_request(error, self.prompt_field))?;
            let others = (1..self.n).map(|i| first.again(engine.next_id(), self.seed.wrapping_add(i as u64)));
            let others: Vec<_> = others.collect();
            requests.push(first);
            requests.extend(others);
        }
        let stop = StopMatcher::new(&self.stop, self.extra.include_stop_str_in_output)
            .map_err(|e| ApiError::invalid("stop", e.to_string()))?;
        let stop = (stop, Arc::from(self.stop.as_slice()));
        let choices = requests
            .into_iter()
            .enumerate()
            .map(|(i, request)| Choice::submit(state, i, &self, &stop, request))
            .collect::<Result<_, _>>()?;
        // As the choices: none that is refused.
        state.metrics().per_request.submitted(self.n);
        context.generates(Generation {
            model: state.model().id.clone(),
            max_tokens: self.max_tokens,
            temperature: self.sampling.temperature,
            top_p: self.sampling.top_p,
            prompt_tokens: self.prompts.iter().map(Vec::len).sum(),
            ..Default::default()
        });
        Ok(choices)
    }
}

/// Most bad words, and bytes of each; they are looked up on the way.
const MAX_BAD_WORDS: usize = 256;
const MAX_BAD_WORD_BYTES: usize = 256;

/// Bad words are banned in the ways in which they are written at the beginning of a text and behind a space.
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
            let tokens = tokenizer.encode_literal(&text, false)?;
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

/// One choice of a response while it is generated: tokens in, text out. Dropping it cancels.
#[derive(Debug)]
pub(crate) struct Choice {
    index: usize,
    /// `None` once a stop string ended the choice, which cancels the request.
    events: Option<RequestStream>,
    detokenizer: Detokenizer,
    stop: StopMatcher,
    stop_strings: Arc<[String]>,
    named_stops: Arc<[TokenId]>,
    timer: Timer,
    context: Context,
    /// When the first step must have begun.
    begin_by: Option<Instant>,
    /// When all must be done.
    deadline: Option<Instant>,
    /// The token that ends the text is part of it.
    include_stop: bool,
    /// Stop strings are looked for behind so many tokens.
    min_tokens: usize,
    prompt_len: usize,
    /// Counted once per prompt, not once per choice.
    prompt_tokens: usize,
    generated: usize,
    cached_tokens: Option<usize>,
    /// Tokens whose text has not been given out.
    held: Vec<TokenLogprobs>,
}

/// A token with the logprobs that were asked for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenLogprobs {
    pub(crate) token: TokenId,
    pub(crate) logprobs: Logprobs,
}

/// What a choice gained since the last piece; the last one has `finish`.
#[derive(Debug, Default)]
pub(crate) struct Piece {
    /// Which choice.
    pub(crate) index: usize,
    pub(crate) text: String,
    /// For each token, how long `text` was when it had been taken.
    pub(crate) ends: Vec<usize>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) finish: Option<FinishReason>,
    /// What the client named to end it, if that did.
    pub(crate) stop: Option<StopReason>,
    /// Of the prompt's tokens, from the second on; all of them come with the choice's first text, or its end.
    pub(crate) prompt: Vec<PromptLogprob>,
    /// Tokens that were generated, the one that ends the choice included.
    pub(crate) tokens: Vec<TokenId>,
    /// Of the choice, so far.
    pub(crate) so_far: Usage,
    /// With `finish`: what the choice adds to the usage of the response.
    pub(crate) usage: Usage,
}

impl Choice {
    fn submit(
        state: &AppState,
        index: usize,
        job: &Job,
        (stop, stop_strings): &(StopMatcher, Arc<[String]>),
        request: Request,
    ) -> Result<Self, ApiError> {
        let (prompt_len, max_tokens) = (request.prompt().len(), request.max_tokens());
        let submitted = Instant::now();
        let events = state.engine().submit(request)?;
        // Of an admitted request alone: one that is refused is not aborted.
        let timer = Timer::start(&state.metrics().per_request, prompt_len, max_tokens, submitted);
        let prompt_tokens = if index.is_multiple_of(job.n) {
            prompt_len
        } else {
            0
        };
        let skip_special = job.extra.skip_special_tokens.unwrap_or(true);
        Ok(Self {
            index,
            events: Some(events),
            detokenizer: state
                .model()
                .tokenizer
                .detokenizer(skip_special)
                .continuing()
                .showing(Arc::clone(&job.shown)),
            stop: stop.clone(),
            stop_strings: Arc::clone(stop_strings),
            named_stops: Arc::clone(&job.named_stops),
            timer,
            begin_by: state
                .options()
                .queue_timeout
                .and_then(|timeout| Instant::now().checked_add(timeout)),
            deadline: job.deadline,
            context: Context::current(),
            include_stop: job.extra.include_stop_str_in_output,
            min_tokens: job.bans.min_tokens,
            prompt_len,
            prompt_tokens,
            generated: 0,
            cached_tokens: None,
            held: Vec::new(),
        })
    }

    /// Tokens of the prompt, if this choice is the one that counts them.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Pieces as they come; an error is the last item.
    pub(crate) fn pieces(self) -> impl Stream<Item = Result<Piece, ApiError>> + Send {
        stream::unfold(self, |mut choice| async {
            choice.next().await.map(|piece| (piece, choice))
        })
    }

    /// The next piece: one token, or as many as have arrived since the last call.
    pub(crate) async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        let mut piece = Piece {
            index: self.index,
            ..Default::default()
        };
        loop {
            // Waits until there is something to tell; takes more only if it is there.
            let event = if piece.text.is_empty() {
                match self.wait().await {
                    Ok(event) => event,
                    Err(error) => {
                        self.timer.failed();
                        self.events = None;
                        return Some(Err(error));
                    }
                }
            } else {
                match self.events.as_mut()?.next().now_or_never() {
                    Some(event) => event,
                    None => return Some(Ok(piece)),
                }
            };
            match event? {
                Event::Admitted { cached_tokens } => {
                    let at = self.sent();
                    self.timer.admitted(at);
                    if self.cached_tokens.is_none() {
                        self.cached_tokens = Some(cached_tokens);
                        self.context
                            .admitted(at, if self.prompt_tokens > 0 { cached_tokens } else { 0 });
                    }
                }
                Event::Prompt(PromptEvent { logprobs, finish }) => {
                    piece.prompt.extend(logprobs);
                    if let Some(reason) = finish {
                        piece.so_far = self.so_far();
                        piece.usage = self.end(reason);
                        piece.finish = finish;
                        return Some(Ok(piece));
                    }
                }
                Event::Pooled(_) => {
                    self.events = None;
                    return Some(Err(StepError::Failed("a vector came for a text".into()).into()));
                }
                Event::Failed(error) => {
                    self.timer.failed();
                    self.events = None;
                    return Some(Err(error.into()));
                }
                Event::Token(token) => {
                    self.take(token, &mut piece);
                    if piece.finish.is_some() {
                        return Some(Ok(piece));
                    }
                }
            }
        }
    }

    /// The next event, unless the time for it is over: an error then, and the choice is to be dropped.
    async fn wait(&mut self) -> Result<Option<Event>, ApiError> {
        let Some(events) = &mut self.events else {
            return Ok(None);
        };
        let begin_by = self.begin_by.filter(|_| self.cached_tokens.is_none());
        let Some(until) = [begin_by, self.deadline].into_iter().flatten().min() else {
            return Ok(events.next().await);
        };
        timeout_at(until.into(), events.next()).await.map_err(|_| {
            let age = self.context.age();
            if self.deadline.is_some_and(|deadline| deadline <= until) {
                ApiError::DeadlineExceeded(age)
            } else {
                ApiError::QueueTimeout(age)
            }
        })
    }

    fn take(&mut self, token: TokenEvent, piece: &mut Piece) {
        self.generated += 1;
        let at = self.sent();
        self.timer.token(at);
        self.context.token(at);
        piece.tokens.push(token.token);
        let mut finish = token.finish;
        if finish == Some(FinishReason::Stop) && self.named_stops.contains(&token.token) {
            piece.stop = Some(StopReason::Token(token.token));
        }
        // The token that stops generation is no part of the text, unless it is wanted.
        if finish != Some(FinishReason::Stop) || self.include_stop {
            let text = self.detokenizer.push(token.token);
            self.held.extend(token.logprobs.map(|logprobs| TokenLogprobs {
                token: token.token,
                logprobs,
            }));
            self.scan(&text, piece, &mut finish);
        }
        if finish.is_some() {
            let text = self.detokenizer.flush();
            self.scan(&text, piece, &mut finish);
            piece.text += &self.stop.flush();
        }
        piece.ends.push(piece.text.len());
        if finish.is_some() || !piece.text.is_empty() {
            piece.logprobs.append(&mut self.held);
        }
        piece.so_far = self.so_far();
        if let Some(reason) = finish {
            piece.usage = self.end(reason);
            piece.finish = finish;
        }
    }

    /// Tokens of the prompt and of the choice so far.
    pub(crate) fn so_far(&self) -> Usage {
        Usage::new(self.prompt_len, self.generated, self.cached_tokens.unwrap_or(0))
    }

    /// Ends the choice, which cancels what is left of the request. What it adds to the usage of the response.
    pub(crate) fn end(&mut self, reason: FinishReason) -> Usage {
        let at = self.sent();
        if self.events.take().is_some() {
            self.timer.finished(reason == FinishReason::Length, at);
            self.context.finished(reason);
        }
        let cached_tokens = match self.prompt_tokens {
            0 => 0,
            _ => self.cached_tokens.unwrap_or(0),
        };
        Usage::new(self.prompt_tokens, self.generated, cached_tokens)
    }

    /// When the engine sent what was heard last.
    fn sent(&self) -> Instant {
        self.events
            .as_ref()
            .map_or_else(Instant::now, RequestStream::sent)
    }

    /// Moves `text` through the stop strings into `piece`.
    fn scan(&mut self, text: &str, piece: &mut Piece, finish: &mut Option<FinishReason>) {
        if self.generated <= self.min_tokens {
            piece.text += text;
            return;
        }
        let scanned = self.stop.push(text);
        piece.text += &scanned.text;
        if let Some(index) = scanned.stop {
            *finish = Some(FinishReason::Stop);
            piece.stop = self.stop_strings.get(index).cloned().map(StopReason::Text);
        }
    }
}

/// All choices of a response, piece by piece, in the order in which they arrive.
pub(crate) fn merge(choices: Vec<Choice>) -> impl Stream<Item = Result<Piece, ApiError>> + Send {
    stream::select_all(choices.into_iter().map(|choice| choice.pieces().boxed()))
}

/// All choices of a response, whole, in order. The first error ends the others.
pub(crate) async fn collect(choices: Vec<Choice>) -> Result<Vec<Piece>, ApiError> {
    let mut whole: Vec<Piece> = choices
        .iter()
        .map(|c| Piece {
            index: c.index,
            ..Default::default()
        })
        .collect();
    let mut pieces = merge(choices);
    while let Some(piece) = pieces.next().await {
        let piece = piece?;
        let into = &mut whole[piece.index];
        into.text += &piece.text;
        into.logprobs.extend(piece.logprobs);
        into.prompt.extend(piece.prompt);
        into.tokens.extend(piece.tokens);
        into.finish = piece.finish;
        into.stop = piece.stop;
        into.so_far = piece.so_far;
        into.usage = piece.usage;
    }
    Ok(whole)
}

/// Work that may take long goes to the blocking pool. A panic there is one here.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            Err(cancelled) => Err(ApiError::Internal(cancelled.to_string())),
        })
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        if error.is_client_error() {
            Self::Invalid {
                message: error.to_string(),
                param: None,
            }
        } else {
            Self::Internal(error.to_string())
        }
    }
}
