//! `/v1/embeddings`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use plimsoll_core::{Event, Limits, Matryoshka, Request, RequestOptions, StepError, TokenId};
use plimsoll_engine::{RequestStream, SubmitError};

use crate::blocking::blocking;
use crate::body::Body;
use crate::context::Context;
use crate::error::ApiError;
use crate::metrics::Timer;
use crate::model::{EmbeddingInfo, ModelInfo};
use crate::openapi::Errors;
use crate::prompt;
use crate::record::Generation;
use crate::state::AppState;
use crate::wire::completion::Prompt;
use crate::wire::embedding::{
    Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage, EncodingFormat, Vector,
};

/// Maximum inputs of one request (OpenAI's limit).
const MAX_INPUTS: usize = 2048;

/// Retry interval for submitting an input while the queue is full.
const RETRY: Duration = Duration::from_millis(20);

const INPUT: &str = "input";

/// Embeddings
///
/// The vectors of one text or several, from a model that is served for embeddings.
#[utoipa::path(
    post, path = "/v1/embeddings", tag = "Embeddings", operation_id = "createEmbedding",
    request_body(content = EmbeddingRequest, example = json!({ "input": ["A load line", "A Plimsoll mark"] })),
    responses((status = 200, description = "A vector for each input, in order.", body = EmbeddingList), Errors)
)]
pub(crate) async fn handle(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Body(EmbeddingRequest(request)): Body<EmbeddingRequest>,
) -> Result<Response, ApiError> {
    state.check_model(request.model.as_deref())?;
    let Some(embedding) = state.model().embedding.clone() else {
        let message = format!(
            "`{}` is served for text generation; serve an embedding model, or this one with --runner pooling",
            state.model().id
        );
        return Err(ApiError::invalid("model", message));
    };
    let size = embedding.cut(request.dimensions)?;
    let limits = state.engine().limits();
    let cut_to = cut_to(request.truncate_prompt_tokens, limits.max_request_tokens())?;
    let (format, special) = (request.encoding_format, request.add_special_tokens);
    let special = special.unwrap_or(true);
    let prompts = request.input.into_vec();
    if prompts.is_empty() || prompts.len() > MAX_INPUTS {
        let message = format!("input has {} texts; 1 to {MAX_INPUTS} are allowed", prompts.len());
        return Err(ApiError::invalid(INPUT, message));
    }
    let model = Arc::clone(state.model());
    let most = limits.max_request_tokens();
    let inputs = blocking(move || tokens_of(&model, prompts, special, cut_to, most)).await?;
    for (index, tokens) in inputs.iter().enumerate() {
        // Check all inputs before computing any.
        embedding
            .request(&state, &context, tokens, &limits)
            .map_err(|error| at(index, error))?;
    }
    let prompt_tokens = inputs.iter().map(Vec::len).sum();
    context.generates(Generation {
        model: state.model().id.clone(),
        prompt_tokens,
        ..Default::default()
    });
    let vectors = context
        .in_time(embedding.compute(&state, &context, inputs))
        .await?;
    blocking(move || {
        let data = vectors.into_iter().enumerate().map(|(index, vector)| {
            let vector = embedding.finish(vector, size)?;
            Ok(Embedding {
                object: "embedding",
                index,
                embedding: encode(vector, format),
            })
        });
        let list = EmbeddingList {
            object: "list",
            data: data.collect::<Result<_, ApiError>>()?,
            model: state.model().id.clone(),
            usage: EmbeddingUsage {
                prompt_tokens,
                total_tokens: prompt_tokens,
            },
        };
        Ok(Json(list).into_response())
    })
    .await
}

/// Tokens of all inputs, at most `most` in each that is not truncated. May take long: for the blocking pool.
fn tokens_of(
    model: &ModelInfo,
    prompts: Vec<Prompt>,
    special: bool,
    cut_to: Option<usize>,
    most: usize,
) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let most = cut_to.is_none().then_some(most);
    let encode = |index: usize, text: &str, special| {
        prompt::encode(model, text, special, most, INPUT).map_err(|error| at(index, error))
    };
    let all = prompts.into_iter().enumerate().map(|(index, prompt)| {
        let (tokens, bare) = match prompt {
            Prompt::Tokens(tokens) => (tokens, Vec::new()),
            Prompt::Text(text) => {
                let tokens = encode(index, &text, special)?;
                let bare = match cut_to {
                    Some(most) if tokens.len() > most => encode(index, &text, false)?,
                    _ => Vec::new(),
                };
                (tokens, bare)
            }
        };
        Ok(match cut_to {
            Some(most) => truncated(tokens, &bare, most),
            None => tokens,
        })
    });
    all.collect()
}

/// The number of tokens that inputs are truncated to.
fn cut_to(asked: Option<i64>, most: usize) -> Result<Option<usize>, ApiError> {
    match asked {
        None => Ok(None),
        Some(-1) => Ok(Some(most)),
        Some(tokens) => match usize::try_from(tokens) {
            Ok(tokens @ 1..) if tokens <= most => Ok(Some(tokens)),
            _ => Err(ApiError::invalid(
                "truncate_prompt_tokens",
                format!("truncate_prompt_tokens must be -1 or between 1 and {most}, not {tokens}"),
            )),
        },
    }
}

/// Truncates to `most` tokens. `tokens` are `bare` with the tokenizer's special tokens around them, which are kept.
fn truncated(tokens: Vec<TokenId>, bare: &[TokenId], most: usize) -> Vec<TokenId> {
    if tokens.len() <= most {
        return tokens;
    }
    let around = tokens.len().saturating_sub(bare.len());
    let inside = (0..=around).find(|&first| tokens[first..].starts_with(bare));
    match inside {
        Some(first) if around < most => {
            let kept = &bare[..most - around];
            let behind = &tokens[first + bare.len()..];
            [&tokens[..first], kept, behind].concat()
        }
        _ => tokens[..most].to_vec(),
    }
}

/// Adds the input's index to an error.
fn at(index: usize, mut error: ApiError) -> ApiError {
    match &mut error {
        ApiError::ContextLength { message, .. } => {
            *message = format!("input[{index}]: {message}; set truncate_prompt_tokens to truncate it");
        }
        ApiError::Field(field) => return ApiError::invalid(INPUT, format!("input[{index}]: {field}")),
        _ => {}
    }
    error
}

impl EmbeddingInfo {
    /// The dimensions of the vectors to return.
    fn cut(&self, dimensions: Option<usize>) -> Result<usize, ApiError> {
        let Some(asked) = dimensions else {
            return Ok(self.size);
        };
        let wrong = |message| Err(ApiError::invalid("dimensions", message));
        if asked == 0 || asked > self.size {
            return wrong(format!(
                "dimensions must be between 1 and {}, not {asked}",
                self.size
            ));
        }
        match &self.matryoshka {
            matryoshka if asked == self.size || matryoshka.allows(asked) => Ok(asked),
            Matryoshka::Sizes(sizes) => wrong(format!(
                "this model's vectors may be cut to {sizes:?} elements, not to {asked}"
            )),
            _ => wrong(format!(
                "this model's vectors of {} elements may not be cut: it does not say that it was trained for that \
                 (is_matryoshka; see --hf-overrides)",
                self.size
            )),
        }
    }

    fn request(
        &self,
        state: &AppState,
        context: &Context,
        tokens: &[TokenId],
        limits: &Limits,
    ) -> Result<Request, ApiError> {
        let options = RequestOptions {
            prompt: tokens.to_vec(),
            pooling: Some(self.pooling),
            tenant: context.tenant(),
            ..Default::default()
        };
        let request = Request::new(state.engine().next_id(), options, limits);
        request.map_err(|error| ApiError::from_request(error, INPUT, INPUT))
    }

    /// The vectors of all inputs, in order. Uses at most half of the engine's capacity at a time, so there may be more inputs
    /// than that. Dropping the future cancels all of them.
    async fn compute(
        &self,
        state: &AppState,
        context: &Context,
        inputs: Vec<Vec<TokenId>>,
    ) -> Result<Vec<Vec<f32>>, ApiError> {
        let engine = state.engine();
        let most = (engine.capacity() / 2).max(1);
        let mut vectors = vec![Vec::new(); inputs.len()];
        let mut pending: VecDeque<_> = inputs.into_iter().enumerate().collect();
        let mut running = FuturesUnordered::new();
        let mut begun = false;
        loop {
            while running.len() < most
                && let Some((index, tokens)) = pending.front()
            {
                let index = *index;
                let request = self.request(state, context, tokens, &engine.limits());
                let submitted = Instant::now();
                match engine.offer(request.map_err(|error| at(index, error))?) {
                    Ok(events) => {
                        let timer = Timer::start(&state.metrics().per_request, tokens.len(), 0, submitted);
                        running
                            .push(async move { Ok::<_, StepError>((index, vector(events, timer).await?)) });
                        pending.pop_front();
                        begun = true;
                    }
                    // Wait for one of this request's inputs to finish.
                    Err(SubmitError::QueueFull { .. } | SubmitError::ShareFull { .. })
                        if !running.is_empty() =>
                    {
                        break;
                    }
                    Err(SubmitError::QueueFull { .. } | SubmitError::ShareFull { .. }) if begun => {
                        tokio::time::sleep(RETRY).await;
                    }
                    Err(error) => {
                        engine.turned_away(&error);
                        return Err(error.into());
                    }
                }
            }
            match running.next().await {
                Some(done) => {
                    let (index, vector) = done?;
                    vectors[index] = vector;
                }
                None => return Ok(vectors),
            }
        }
    }

    /// Truncates to `size` dimensions, then normalizes.
    fn finish(&self, mut vector: Vec<f32>, size: usize) -> Result<Vec<f32>, ApiError> {
        vector.truncate(size);
        let norm = vector.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        if !norm.is_finite() {
            return Err(ApiError::Internal("the model's output is not finite".into()));
        }
        if self.normalize && norm > 0.0 {
            for x in &mut vector {
                *x = (f64::from(*x) / norm) as f32;
            }
        }
        Ok(vector)
    }
}

/// Waits for the vector of one input.
async fn vector(mut events: RequestStream, mut timer: Timer) -> Result<Vec<f32>, StepError> {
    while let Some(event) = events.next().await {
        match event {
            Event::Admitted { .. } => timer.admitted(events.sent()),
            Event::Pooled(vector) => {
                timer.pooled(events.sent());
                return Ok(vector);
            }
            Event::Failed(error) => {
                timer.failed();
                return Err(error);
            }
            _ => break,
        }
    }
    timer.failed();
    Err(StepError::Failed("got text for an embedding request".into()))
}

fn encode(vector: Vec<f32>, format: EncodingFormat) -> Vector {
    match format {
        EncodingFormat::Float => Vector::Floats(vector),
        EncodingFormat::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            Vector::Base64(STANDARD.encode(bytes))
        }
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_core::Pooling;

    use super::*;

    fn info(matryoshka: Matryoshka) -> EmbeddingInfo {
        EmbeddingInfo {
            pooling: Pooling::Last,
            normalize: true,
            size: 4,
            matryoshka,
        }
    }

    #[test]
    fn only_matryoshka_vectors_are_truncated() {
        let no = info(Matryoshka::No);
        assert_eq!((no.cut(None).unwrap(), no.cut(Some(4)).unwrap()), (4, 4));
        for wrong in [0, 1, 5] {
            assert!(no.cut(Some(wrong)).is_err(), "{wrong}");
        }
        assert_eq!(info(Matryoshka::Any).cut(Some(3)).unwrap(), 3);
        assert!(info(Matryoshka::Any).cut(Some(5)).is_err());
        let some = info(Matryoshka::Sizes(vec![2]));
        assert_eq!(some.cut(Some(2)).unwrap(), 2);
        assert!(some.cut(Some(3)).is_err());
    }

    #[test]
    fn truncated_vectors_are_normalized_again() {
        let any = info(Matryoshka::Any);
        assert_eq!(any.finish(vec![3.0, 4.0, 12.0, 84.0], 2).unwrap(), [0.6, 0.8]);
        assert_eq!(any.finish(vec![0.0; 4], 4).unwrap(), [0.0; 4]);
        assert!(any.finish(vec![f32::NAN; 4], 4).is_err());
        let plain = EmbeddingInfo {
            normalize: false,
            ..any
        };
        assert_eq!(plain.finish(vec![3.0, 4.0, 12.0, 84.0], 2).unwrap(), [3.0, 4.0]);
    }

    #[test]
    fn base64_is_of_little_endian_floats() {
        match encode(vec![1.0, -2.5], EncodingFormat::Base64) {
            Vector::Base64(text) => assert_eq!(text, "AACAPwAAIMA="),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn truncation_keeps_special_tokens() {
        let cut = |most| truncated(vec![1, 7, 8, 9, 2], &[7, 8, 9], most);
        assert_eq!(cut(9), [1, 7, 8, 9, 2]);
        assert_eq!(cut(4), [1, 7, 8, 2]);
        assert_eq!(cut(3), [1, 7, 2]);
        assert_eq!(cut(2), [1, 7]);
        assert_eq!(truncated(vec![7, 8, 9], &[7, 8, 9], 2), [7, 8]);
    }

    #[test]
    fn truncation_lengths_are_checked() {
        assert_eq!(cut_to(None, 9).unwrap(), None);
        assert_eq!(cut_to(Some(-1), 9).unwrap(), Some(9));
        assert_eq!(cut_to(Some(4), 9).unwrap(), Some(4));
        for wrong in [-2, 0, 10, i64::MAX] {
            assert!(cut_to(Some(wrong), 9).is_err(), "{wrong}");
        }
    }
}
