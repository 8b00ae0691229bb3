//! Vectors of texts, from a model that is served for embeddings.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use plimsoll_core::{Event, Limits, Matryoshka, Request, RequestOptions, StepError, TokenId};
use plimsoll_engine::{RequestStream, SubmitError};

use crate::blocking::blocking;
use crate::context::Context;
use crate::error::ApiError;
use crate::metrics::Timer;
use crate::model::{EmbeddingInfo, ModelInfo};
use crate::prompt;
use crate::record::Generation;
use crate::state::AppState;
use crate::wire::completion::Prompt;
use crate::wire::extra::TruncationSide;

/// Maximum number of texts of one request (OpenAI's limit).
const MAX_TEXTS: usize = 2048;

/// Retry interval for submitting a text while the queue is full.
const RETRY: Duration = Duration::from_millis(20);

/// Texts in one field of a request.
#[derive(Debug)]
pub(crate) struct Source {
    /// The field, for errors.
    pub(crate) field: &'static str,
    pub(crate) prompts: Vec<Prompt>,
    /// The field is a list: errors have the text's index.
    pub(crate) is_list: bool,
    /// Truncates each.
    pub(crate) cut: Option<Cut>,
}

impl Source {
    /// Names a text in an error.
    pub(crate) fn blame(&self, index: usize, error: ApiError) -> ApiError {
        self.place(index).blame(error)
    }

    fn place(&self, index: usize) -> Place {
        Place {
            field: self.field,
            index: self.is_list.then_some(index),
        }
    }
}

/// An error where there are no texts, or too many.
pub(crate) fn check_count<'a>(sources: impl Iterator<Item = &'a Source> + Clone) -> Result<(), ApiError> {
    let count: usize = sources.clone().map(|source| source.prompts.len()).sum();
    if let Some(empty) = sources.clone().find(|source| source.prompts.is_empty()) {
        let message = format!("{} has no texts; 1 to {MAX_TEXTS} are allowed", empty.field);
        return Err(ApiError::invalid(empty.field, message));
    }
    if count > MAX_TEXTS {
        let largest = sources.max_by_key(|source| source.prompts.len());
        let field = largest.map_or("input", |source| source.field);
        let message = format!("{field} has {count} texts; 1 to {MAX_TEXTS} are allowed");
        return Err(ApiError::invalid(field, message));
    }
    Ok(())
}

/// How texts are truncated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// To this many tokens.
    to: usize,
    /// Which end is cut off.
    side: TruncationSide,
}

impl Cut {
    /// To how many tokens.
    pub(crate) fn most(self) -> usize {
        self.to
    }

    /// The same to `tokens` tokens.
    pub(crate) fn to(self, tokens: usize) -> Self {
        Self { to: tokens, ..self }
    }

    /// `asked` is what the client says in `field`, -1 for `most`.
    pub(crate) fn new(
        field: &'static str,
        asked: Option<i64>,
        side: Option<TruncationSide>,
        most: usize,
    ) -> Result<Option<Self>, ApiError> {
        let Some(asked) = asked else {
            return Ok(None);
        };
        let to = match usize::try_from(asked) {
            _ if asked == -1 => most,
            Ok(tokens @ 1..) if tokens <= most => tokens,
            _ => {
                let message = format!("{field} must be -1 or between 1 and {most}, not {asked}");
                return Err(ApiError::invalid(field, message));
            }
        };
        let side = side.unwrap_or(TruncationSide::Right);
        Ok(Some(Self { to, side }))
    }

    /// `tokens` are `bare` with the tokenizer's special tokens around them, which are kept.
    pub(crate) fn apply(self, mut tokens: Vec<TokenId>, bare: &[TokenId]) -> Vec<TokenId> {
        if tokens.len() <= self.to {
            return tokens;
        }
        let around = tokens.len().saturating_sub(bare.len());
        let inside = (0..=around).find(|&first| tokens[first..].starts_with(bare));
        match inside {
            Some(first) if around < self.to => {
                let kept = self.to - around;
                let kept = match self.side {
                    TruncationSide::Left => &bare[bare.len() - kept..],
                    TruncationSide::Right => &bare[..kept],
                };
                let behind = &tokens[first + bare.len()..];
                [&tokens[..first], kept, behind].concat()
            }
            _ => match self.side {
                TruncationSide::Left => tokens.split_off(tokens.len() - self.to),
                TruncationSide::Right => {
                    tokens.truncate(self.to);
                    tokens
                }
            },
        }
    }
}

/// The tokens of a request's texts.
#[derive(Debug)]
pub(crate) struct Texts {
    tokens: Vec<Vec<TokenId>>,
    places: Vec<Place>,
}

/// Where in the request a text is.
#[derive(Clone, Copy, Debug)]
struct Place {
    field: &'static str,
    index: Option<usize>,
}

impl Place {
    /// Names the text in an error.
    fn blame(self, mut error: ApiError) -> ApiError {
        let field = self.field;
        let text = self
            .index
            .map_or_else(|| field.to_owned(), |index| format!("{field}[{index}]"));
        match &mut error {
            ApiError::ContextLength { message, .. } => {
                *message = format!("{text}: {message}; set truncate_prompt_tokens to truncate it");
            }
            ApiError::Field(error) => return ApiError::invalid(field, format!("{text}: {error}")),
            _ => {}
        }
        error
    }
}

impl Texts {
    /// Tokenizes and checks all texts, before any is computed. `add_special` adds the tokenizer's special tokens.
    pub(crate) async fn new(
        state: &AppState,
        context: &Context,
        embedding: &EmbeddingInfo,
        sources: Vec<Source>,
        add_special: bool,
    ) -> Result<Self, ApiError> {
        check_count(sources.iter())?;
        let model = Arc::clone(state.model());
        let limits = state.engine().limits();
        let texts =
            blocking(move || Self::encode(&model, sources, add_special, limits.max_request_tokens())).await?;
        for (tokens, place) in texts.tokens.iter().zip(&texts.places) {
            embedding.request(state, context, tokens, *place, &limits)?;
        }
        Ok(texts)
    }

    /// At most `most` tokens of each text that is not truncated. May take long: for the blocking pool.
    fn encode(
        model: &ModelInfo,
        sources: Vec<Source>,
        add_special: bool,
        most: usize,
    ) -> Result<Self, ApiError> {
        let mut texts = Self {
            tokens: Vec::new(),
            places: Vec::new(),
        };
        for source in sources {
            let (field, cut) = (source.field, source.cut);
            let bound = cut.is_none().then_some(most);
            for (index, prompt) in source.prompts.into_iter().enumerate() {
                let place = Place {
                    field,
                    index: source.is_list.then_some(index),
                };
                let encode = |text: &str, special| {
                    let tokens = prompt::encode(model, text, special, bound, field);
                    tokens.map_err(|error| place.blame(error))
                };
                let (tokens, bare) = match prompt {
                    Prompt::Tokens(tokens) => (tokens, Vec::new()),
                    Prompt::Text(text) => {
                        let tokens = encode(&text, add_special)?;
                        let bare = match cut {
                            Some(cut) if tokens.len() > cut.to => encode(&text, false)?,
                            _ => Vec::new(),
                        };
                        (tokens, bare)
                    }
                };
                texts.tokens.push(match cut {
                    Some(cut) => cut.apply(tokens, &bare),
                    None => tokens,
                });
                texts.places.push(place);
            }
        }
        Ok(texts)
    }

    /// Tokens of all texts.
    pub(crate) fn count(&self) -> usize {
        self.tokens.iter().map(Vec::len).sum()
    }
}

impl EmbeddingInfo {
    /// The dimensions of the vectors to return.
    pub(crate) fn cut(&self, dimensions: Option<usize>) -> Result<usize, ApiError> {
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
        place: Place,
        limits: &Limits,
    ) -> Result<Request, ApiError> {
        let options = RequestOptions {
            prompt: tokens.to_vec(),
            pooling: Some(self.pooling),
            tenant: context.queued_as(),
            ..Default::default()
        };
        let request = Request::new(state.engine().next_id(), options, limits);
        request.map_err(|error| place.blame(ApiError::from_request(error, place.field, place.field)))
    }

    /// The vectors of all texts, in order and as the model gives them, within the request's deadline.
    pub(crate) async fn vectors(
        &self,
        state: &AppState,
        context: &Context,
        texts: Texts,
    ) -> Result<Vec<Vec<f32>>, ApiError> {
        context.generates(Generation {
            model: state.model().id.clone(),
            prompt_tokens: texts.count(),
            ..Default::default()
        });
        context.in_time(self.compute(state, context, texts)).await
    }

    /// Uses at most half of the engine's capacity at a time, so there may be more texts than that. Dropping the future cancels
    /// all of them.
    async fn compute(
        &self,
        state: &AppState,
        context: &Context,
        texts: Texts,
    ) -> Result<Vec<Vec<f32>>, ApiError> {
        let engine = state.engine();
        let most = (engine.capacity() / 2).max(1);
        let mut vectors = vec![Vec::new(); texts.tokens.len()];
        let mut pending: VecDeque<_> = texts.tokens.into_iter().zip(texts.places).enumerate().collect();
        let mut running = FuturesUnordered::new();
        let mut begun = false;
        loop {
            while running.len() < most
                && let Some((index, (tokens, place))) = pending.front()
            {
                let index = *index;
                let request = self.request(state, context, tokens, *place, &engine.limits())?;
                let submitted = Instant::now();
                match engine.offer(request) {
                    Ok(events) => {
                        let timer = Timer::start(&state.metrics().per_request, tokens.len(), 0, submitted);
                        running
                            .push(async move { Ok::<_, StepError>((index, vector(events, timer).await?)) });
                        pending.pop_front();
                        begun = true;
                    }
                    // Wait for one of this request's texts to finish.
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
    pub(crate) fn finish(&self, mut vector: Vec<f32>, size: usize) -> Result<Vec<f32>, ApiError> {
        vector.truncate(size);
        let length = square(&vector)?.sqrt();
        if self.normalize && length > 0.0 {
            for x in &mut vector {
                *x = (f64::from(*x) / length) as f32;
            }
        }
        Ok(vector)
    }
}

/// The square of a vector's Euclidean length.
fn square(vector: &[f32]) -> Result<f64, ApiError> {
    let square: f64 = vector.iter().map(|&x| f64::from(x).powi(2)).sum();
    match square.is_finite() {
        true => Ok(square),
        false => Err(ApiError::Internal("the model's output is not finite".into())),
    }
}

/// The cosine of the angle between two vectors; 0 if one has no direction.
pub(crate) fn cosine(a: &[f32], b: &[f32]) -> Result<f64, ApiError> {
    let lengths = (square(a)? * square(b)?).sqrt();
    let product: f64 = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    match lengths > 0.0 {
        true => Ok((product / lengths).clamp(-1.0, 1.0)),
        false => Ok(0.0),
    }
}

/// Waits for the vector of one text.
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
            scorer: None,
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
    fn cosines_do_not_depend_on_lengths() {
        let of = |a: [f32; 2], b: [f32; 2]| cosine(&a, &b).unwrap();
        assert!((of([3.0, 4.0], [8.0, 6.0]) - 0.96).abs() < 1e-12);
        assert_eq!(of([0.0, 2.0], [0.0, -7.0]), -1.0);
        assert_eq!(of([0.0, 0.0], [1.0, 0.0]), 0.0);
        assert!(cosine(&[f32::NAN], &[1.0]).is_err());
    }

    #[test]
    fn truncation_keeps_special_tokens() {
        use TruncationSide::{Left, Right};
        let cut = |to, side| Cut { to, side }.apply(vec![1, 7, 8, 9, 2], &[7, 8, 9]);
        assert_eq!(cut(9, Right), [1, 7, 8, 9, 2]);
        assert_eq!(cut(4, Right), [1, 7, 8, 2]);
        assert_eq!(cut(3, Right), [1, 7, 2]);
        assert_eq!(cut(2, Right), [1, 7]);
        assert_eq!(cut(4, Left), [1, 8, 9, 2]);
        assert_eq!(cut(2, Left), [9, 2]);
        let bare = |side| Cut { to: 2, side }.apply(vec![7, 8, 9], &[7, 8, 9]);
        assert_eq!((bare(Right), bare(Left)), (vec![7, 8], vec![8, 9]));
    }

    #[test]
    fn truncation_lengths_are_checked() {
        let to = |asked| Ok(Cut::new("x", asked, None, 9)?.map(|cut| cut.to));
        let to = |asked| to(asked).map_err(|error: ApiError| error.to_string());
        assert_eq!(to(None), Ok(None));
        assert_eq!(to(Some(-1)), Ok(Some(9)));
        assert_eq!(to(Some(4)), Ok(Some(4)));
        for wrong in [-2, 0, 10, i64::MAX] {
            assert!(
                to(Some(wrong)).unwrap_err().starts_with("x must be -1 or"),
                "{wrong}"
            );
        }
    }
}
