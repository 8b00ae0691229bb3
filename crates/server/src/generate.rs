//! Choices while they are generated: requests to the engine, and its tokens back to text.

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
use crate::request_memory::Reservation;
use crate::state::AppState;
use crate::wire::common::{StopReason, Usage};

/// Submits all choices of a job or none: one that is refused cancels those before it.
pub(crate) fn submit(state: &AppState, context: &Context, mut job: Job) -> Result<Vec<Choice>, ApiError> {
    let requests = std::mem::take(&mut job.requests);
    let choices: Vec<Choice> = requests
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
    /// Deadline of leaving the queue.
    begin_by: Option<Instant>,
    /// Deadline of the whole request.
    deadline: Option<Instant>,
    prompt_len: usize,
    /// 0 for all but the first choice of a prompt: counted once per prompt.
    prompt_tokens: usize,
    generated: usize,
    cached_tokens: Option<usize>,
    /// Tokens whose text was not emitted yet.
    held: Vec<TokenLogprobs>,
    /// Memory of the prompt's images: a request that is preempted needs them again.
    image_memory: Option<Arc<Reservation>>,
}

/// A token with the requested log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenLogprobs {
    pub(crate) token: TokenId,
    pub(crate) logprobs: Logprobs,
}

/// What a choice generated since the last output; the last output has `finish`.
#[derive(Debug, Default)]
pub(crate) struct Output {
    /// Which choice.
    pub(crate) index: usize,
    pub(crate) text: String,
    /// For each token, the length of `text` after it, in bytes.
    pub(crate) ends: Vec<usize>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// For each token, the length of `logprobs` after it.
    pub(crate) scored: Vec<usize>,
    pub(crate) finish: Option<FinishReason>,
    /// The client's stop string or token that ended it, if one did.
    pub(crate) stop: Option<StopReason>,
    /// Log-probabilities of the prompt's tokens from the second on; all come with the choice's first text or its end.
    pub(crate) prompt: Vec<PromptLogprob>,
    /// Generated tokens, including the one that ends the choice.
    pub(crate) tokens: Vec<TokenId>,
    /// Usage of the choice so far.
    pub(crate) so_far: Usage,
    /// With `finish`: what the choice adds to the response's usage.
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
            image_memory: job.image_memory.clone(),
        })
    }

    /// Prompt tokens, on the first choice of each prompt; 0 on others, so that they are counted once.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Outputs as they come; an error is the last item.
    pub(crate) fn outputs(self) -> impl Stream<Item = Result<Output, ApiError>> + Send {
        stream::unfold(self, |mut choice| async {
            choice.next().await.map(|output| (output, choice))
        })
    }

    /// The next output: one token, or as many as have arrived since the last call.
    pub(crate) async fn next(&mut self) -> Option<Result<Output, ApiError>> {
        let mut output = Output {
            index: self.index,
            ..Default::default()
        };
        loop {
            // Waits for the first text; then takes only what is already there.
            let event = if output.text.is_empty() {
                match self.wait().await {
                    Ok(event) => event,
                    Err(error) => {
                        self.timer.failed();
                        self.leave();
                        return Some(Err(error));
                    }
                }
            } else {
                match self.events.as_mut()?.next().now_or_never() {
                    Some(event) => event,
                    None => return Some(Ok(output)),
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
                    output.prompt.extend(logprobs);
                    if let Some(reason) = finish {
                        output.so_far = self.so_far();
                        output.usage = self.end(reason);
                        output.finish = finish;
                        return Some(Ok(output));
                    }
                }
                Event::Pooled(_) => {
                    self.leave();
                    return Some(Err(StepError::Failed(
                        "got an embedding for a generation request".into(),
                    )
                    .into()));
                }
                Event::Failed(error) => {
                    self.timer.failed();
                    self.leave();
                    return Some(Err(error.into()));
                }
                Event::Token(token) => {
                    self.take(token, &mut output);
                    if output.finish.is_some() {
                        return Some(Ok(output));
                    }
                }
            }
        }
    }

    /// The next event; an error if a deadline passes before it.
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

    fn take(&mut self, token: TokenEvent, output: &mut Output) {
        self.generated += 1;
        let at = self.sent();
        self.timer.token(at);
        self.context.token(at);
        output.tokens.push(token.token);
        let mut finish = token.finish;
        if finish == Some(FinishReason::Stop) && self.stopping.named_tokens.contains(&token.token) {
            output.stop = Some(StopReason::Token(token.token));
        }
        // The stop token is not part of the text unless requested.
        let is_text = finish != Some(FinishReason::Stop) || self.stopping.include_stop;
        if is_text || self.stopping.scores_stop {
            self.held.extend(token.logprobs.map(|logprobs| TokenLogprobs {
                token: token.token,
                logprobs,
            }));
        }
        if is_text {
            let text = self.detokenizer.push(token.token);
            self.scan(&text, output, &mut finish);
        }
        if finish.is_some() {
            let text = self.detokenizer.flush();
            self.scan(&text, output, &mut finish);
            output.text += &self.stopping.matcher.flush();
        }
        output.ends.push(output.text.len());
        if finish.is_some() || !output.text.is_empty() {
            output.logprobs.append(&mut self.held);
        }
        output.scored.push(output.logprobs.len());
        output.so_far = self.so_far();
        if let Some(reason) = finish {
            output.usage = self.end(reason);
            output.finish = finish;
        }
    }

    /// Usage of the prompt and the choice so far.
    pub(crate) fn so_far(&self) -> Usage {
        Usage::new(self.prompt_len, self.generated, self.cached_tokens.unwrap_or(0))
    }

    /// Ends the choice, which cancels the rest of the request. Returns what it adds to the response's usage.
    pub(crate) fn end(&mut self, reason: FinishReason) -> Usage {
        let at = self.sent();
        if self.leave() {
            self.timer.finished(reason == FinishReason::Length, at);
            self.context.finished(reason);
        }
        let cached_tokens = match self.prompt_tokens {
            0 => 0,
            _ => self.cached_tokens.unwrap_or(0),
        };
        Usage::new(self.prompt_tokens, self.generated, cached_tokens)
    }

    /// Leaves the engine, which cancels the request. False if it was left before.
    fn leave(&mut self) -> bool {
        self.image_memory = None;
        self.events.take().is_some()
    }

    /// When the engine sent the last event: a slow client does not distort the metrics.
    fn sent(&self) -> Instant {
        self.events
            .as_ref()
            .map_or_else(Instant::now, RequestStream::sent)
    }

    /// Appends `text` to `output` up to a stop string.
    fn scan(&mut self, text: &str, output: &mut Output, finish: &mut Option<FinishReason>) {
        if self.generated <= self.stopping.min_tokens {
            output.text += text;
            return;
        }
        let scanned = self.stopping.matcher.push(text);
        output.text += &scanned.text;
        if let Some(index) = scanned.stop {
            *finish = Some(FinishReason::Stop);
            output.stop = self.stopping.strings.get(index).cloned().map(StopReason::Text);
        }
    }
}

/// The outputs of all choices of a response as they arrive.
pub(crate) fn merge(choices: Vec<Choice>) -> impl Stream<Item = Result<Output, ApiError>> + Send {
    stream::select_all(choices.into_iter().map(|choice| choice.outputs().boxed()))
}

/// Waits for all choices of a response, in order. The first error cancels the others.
pub(crate) async fn collect(choices: Vec<Choice>) -> Result<Vec<Output>, ApiError> {
    let mut whole: Vec<Output> = choices
        .iter()
        .map(|c| Output {
            index: c.index,
            ..Default::default()
        })
        .collect();
    let mut outputs = merge(choices);
    while let Some(output) = outputs.next().await {
        let output = output?;
        let into = &mut whole[output.index];
        into.text += &output.text;
        into.logprobs.extend(output.logprobs);
        into.prompt.extend(output.prompt);
        into.tokens.extend(output.tokens);
        into.finish = output.finish;
        into.stop = output.stop;
        into.so_far = output.so_far;
        into.usage = output.usage;
    }
    Ok(whole)
}
