//! Choices while they are generated: submitted to the engine, then from its tokens to text.

use std::sync::Arc;
use std::time::Instant;

use futures::{FutureExt, Stream, StreamExt, stream};
use plimsoll_core::{
    Event, FinishReason, Logprobs, PromptEvent, PromptLogprob, Request, StepError, TokenEvent, TokenId,
};
use plimsoll_engine::RequestStream;
use plimsoll_text::Detokenizer;
use tokio::time::timeout_at;

use crate::context::Context;
use crate::error::ApiError;
use crate::job::{Job, Stopping};
use crate::metrics::Timer;
use crate::state::AppState;
use crate::wire::common::{StopReason, Usage};

/// Submits all choices of a job or none: one that is refused cancels those before it.
pub(crate) fn submit(state: &AppState, context: &Context, mut job: Job) -> Result<Vec<Choice>, ApiError> {
    let requests = std::mem::take(&mut job.requests);
    let choices = requests
        .into_iter()
        .enumerate()
        .map(|(i, request)| Choice::submit(state, context, &job, i, request))
        .collect::<Result<_, _>>()?;
    // After admission, as for the choices.
    state.metrics().per_request.submitted(job.n);
    context.generates(job.generation);
    Ok(choices)
}

/// One choice of a response while it is generated: tokens in, text out. Dropping it cancels.
#[derive(Debug)]
pub(crate) struct Choice {
    index: usize,
    /// `None` once a stop string ended the choice, which cancels the request.
    events: Option<RequestStream>,
    detokenizer: Detokenizer,
    stopping: Stopping,
    timer: Timer,
    context: Context,
    /// When the first step must have begun.
    begin_by: Option<Instant>,
    /// When all must be done.
    deadline: Option<Instant>,
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
        context: &Context,
        job: &Job,
        index: usize,
        request: Request,
    ) -> Result<Self, ApiError> {
        let (prompt_len, max_tokens) = (request.prompt().len(), request.max_tokens());
        let submitted = Instant::now();
        let events = state.engine().submit(request)?;
        // After admission: a refused request does not count as aborted.
        let timer = Timer::start(&state.metrics().per_request, prompt_len, max_tokens, submitted);
        let is_first = index.is_multiple_of(job.n);
        let tokenizer = &state.model().tokenizer;
        Ok(Self {
            index,
            events: Some(events),
            detokenizer: tokenizer
                .detokenizer(job.stopping.skip_special)
                .continuing()
                .showing(Arc::clone(&job.shown)),
            stopping: job.stopping.clone(),
            timer,
            begin_by: state
                .options()
                .queue_timeout
                .and_then(|timeout| submitted.checked_add(timeout)),
            deadline: job.deadline,
            context: context.clone(),
            prompt_len,
            prompt_tokens: if is_first { prompt_len } else { 0 },
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
        if finish == Some(FinishReason::Stop) && self.stopping.named_tokens.contains(&token.token) {
            piece.stop = Some(StopReason::Token(token.token));
        }
        // The token that stops generation is no part of the text, unless it is wanted.
        if finish != Some(FinishReason::Stop) || self.stopping.include_stop {
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
            piece.text += &self.stopping.matcher.flush();
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
        if self.generated <= self.stopping.min_tokens {
            piece.text += text;
            return;
        }
        let scanned = self.stopping.matcher.push(text);
        piece.text += &scanned.text;
        if let Some(index) = scanned.stop {
            *finish = Some(FinishReason::Stop);
            piece.stop = self.stopping.strings.get(index).cloned().map(StopReason::Text);
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
