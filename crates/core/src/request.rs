use std::sync::Arc;

use crate::{
    Bans, Constraint, Constraints, ImageInput, ImageSpan, ParamError, Pooling, RequestId, SamplingOptions,
    SamplingParams, TenantId, TokenId,
};

/// Limits of a request, known once the size of the KV cache is proved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Prompt plus output tokens of one request.
    pub max_model_len: usize,
    /// Tokens of the longest request that the KV cache holds alone ([`crate::KvConfig::longest_request`]).
    pub kv_capacity_tokens: usize,
    /// Size of the vocabulary; token ids lie below it.
    pub vocab_size: usize,
    /// Which images prompts may have; `None` for text alone.
    pub images: Option<ImageInput>,
}

impl Limits {
    /// Most prompt plus output tokens of one request, by both limits.
    pub fn max_request_tokens(&self) -> usize {
        self.max_model_len.min(self.kv_capacity_tokens)
    }
}

/// A tokenized request as the client sent it, not validated.
#[derive(Clone, Debug, Default)]
pub struct RequestOptions {
    /// The prompt's tokens.
    pub prompt: Vec<TokenId>,
    /// The images of the prompt, in order, without overlap.
    pub images: Vec<ImageSpan>,
    /// Maximum number of tokens to generate; as many as fit if absent.
    pub max_tokens: Option<usize>,
    /// Sampling parameters.
    pub sampling: SamplingOptions,
    /// Same seed, prompt and parameters give the same text. Required: the caller draws one if the client gave none.
    pub seed: u64,
    /// Generation ends after any of these (end-of-sequence tokens included by the caller unless ignored).
    pub stop_token_ids: Vec<TokenId>,
    /// Constraints on the output, in their initial state.
    pub constraints: Vec<Box<dyn Constraint>>,
    /// `Some(k)`: log-probabilities of the prompt's tokens, and the `k` likeliest at each place (at most
    /// [`SamplingParams::MAX_LOGPROBS`]). `max_tokens` may then be 0.
    pub prompt_logprobs: Option<u32>,
    /// Banned tokens.
    pub bans: Bans,
    /// The prefix cache is shared only with requests of the same salt.
    pub cache_salt: Option<Arc<str>>,
    /// Return an embedding instead of text; parameters of generation are ignored.
    pub pooling: Option<Pooling>,
    /// Requests with lower values are admitted earlier.
    pub priority: i64,
    /// Tenant, for fair queueing.
    pub tenant: TenantId,
}

/// Why this server can never serve a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The prompt has no tokens.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// The prompt alone, or with `max_tokens`, does not fit.
    #[error("this server's maximum context length is {limit} tokens, but {}", asked_for(*prompt, *output, *limit))]
    TooLong {
        /// Prompt tokens.
        prompt: usize,
        /// Output tokens asked for.
        output: usize,
        /// [`Limits::max_request_tokens`].
        limit: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {token} is outside the vocabulary of {vocab_size} tokens")]
    UnknownToken {
        /// The offending id.
        token: TokenId,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// Images for a model that is served without.
    #[error("this model is served for text alone: leave images out")]
    NoImages,
    /// Images that the model does not take so.
    #[error("{0}")]
    Images(String),
    /// A parameter outside its range.
    #[error(transparent)]
    Param(#[from] ParamError),
}

fn asked_for(prompt: usize, output: usize, limit: usize) -> String {
    match output {
        0 => format!("there are {prompt} tokens"),
        _ if prompt >= limit => format!("the prompt has {prompt}, which leaves no room for an answer"),
        _ => format!("{prompt} prompt tokens and {output} output tokens were requested"),
    }
}

/// A validated request: it fits the limits, and its parameters are legal.
#[derive(Clone, Debug)]
pub struct Request {
    id: RequestId,
    prompt: Arc<[TokenId]>,
    images: Option<Arc<[ImageSpan]>>,
    has_mutual_spans: bool,
    max_tokens: usize,
    sampling: Arc<SamplingParams>,
    seed: u64,
    stop_token_ids: Vec<TokenId>,
    constraints: Constraints,
    prompt_logprobs: Option<usize>,
    min_tokens: usize,
    /// Parameters for the tokens before `min_tokens`.
    early_sampling: Arc<SamplingParams>,
    /// Banned words of several tokens.
    banned_words: Arc<[Vec<TokenId>]>,
    cache_salt: Option<Arc<str>>,
    pooling: Option<Pooling>,
    priority: i64,
    tenant: TenantId,
}

impl Request {
    /// Checks `options` against `limits`.
    pub fn new(id: RequestId, options: RequestOptions, limits: &Limits) -> Result<Self, RequestError> {
        let RequestOptions {
            prompt,
            images,
            max_tokens,
            sampling,
            seed,
            stop_token_ids,
            mut constraints,
            prompt_logprobs,
            bans,
            cache_salt,
            pooling,
            priority,
            tenant,
        } = options;
        let limit = limits.max_request_tokens();
        if prompt.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        let vocab_size = limits.vocab_size;
        if let Some(&token) = prompt
            .iter()
            .chain(&stop_token_ids)
            .find(|&&t| t as usize >= vocab_size)
        {
            return Err(RequestError::UnknownToken { token, vocab_size });
        }
        match &limits.images {
            _ if images.is_empty() => {}
            None => return Err(RequestError::NoImages),
            Some(input) => input.check(&prompt, &images).map_err(RequestError::Images)?,
        }
        if max_tokens == Some(0) && prompt_logprobs.is_none() && pooling.is_none() {
            return Err(ParamError::new("max_tokens", "max_tokens must be at least 1").into());
        }
        let prompt_logprobs = prompt_logprobs.filter(|_| pooling.is_none());
        let prompt_logprobs = SamplingParams::top_logprobs("prompt_logprobs", prompt_logprobs, vocab_size)?;
        let room = limit.saturating_sub(prompt.len());
        let output = match pooling {
            Some(_) => 0,
            None => max_tokens.unwrap_or(room.max(1)),
        };
        if prompt.len() > limit || output > room {
            return Err(RequestError::TooLong {
                prompt: prompt.len(),
                output,
                limit,
            });
        }
        let bans = match pooling {
            Some(_) => Bans::default(),
            None => bans,
        };
        bans.check(output, vocab_size)?;
        constraints.extend(bans.only_allowed(vocab_size));
        let (words, everywhere) = bans.words();
        let sampling = SamplingParams::new(&sampling, vocab_size)?.banning(everywhere);
        let sampling = Arc::new(sampling);
        let early_sampling = match bans.min_tokens {
            0 => Arc::clone(&sampling),
            _ => Arc::new(sampling.banning(stop_token_ids.iter().copied())),
        };
        Ok(Self {
            id,
            prompt: prompt.into(),
            has_mutual_spans: limits.images.is_some_and(|input| input.mutual),
            images: (!images.is_empty()).then(|| images.into()),
            max_tokens: output,
            sampling,
            seed,
            stop_token_ids,
            constraints: Constraints::new(constraints),
            prompt_logprobs,
            min_tokens: bans.min_tokens,
            early_sampling,
            banned_words: words,
            cache_salt,
            pooling,
            priority,
            tenant,
        })
    }

    /// A clone with a new `id` and `seed`.
    #[must_use]
    pub fn again(&self, id: RequestId, seed: u64) -> Self {
        Self {
            id,
            seed,
            ..self.clone()
        }
    }

    /// The request's id.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The prompt's tokens, never empty.
    pub fn prompt(&self) -> &[TokenId] {
        &self.prompt
    }

    /// The images of the prompt, in order; `None` without any.
    pub fn images(&self) -> Option<&Arc<[ImageSpan]>> {
        self.images.as_ref()
    }

    /// Whether no run may end inside a span of its images ([`ImageInput::mutual`]).
    pub fn has_mutual_spans(&self) -> bool {
        self.has_mutual_spans
    }

    /// Maximum number of tokens to generate; with the prompt they fit the model and the KV cache. 0 only if the prompt is
    /// scored or pooled.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Maximum number of prompt plus output tokens.
    pub fn longest(&self) -> usize {
        self.prompt.len() + self.max_tokens
    }

    /// Sampling parameters, without bans that depend on the position or on earlier tokens.
    pub fn sampling(&self) -> &Arc<SamplingParams> {
        &self.sampling
    }

    /// Sampling parameters of output token `index`, which follows `output`. The last token of `output` may be missing unless
    /// [`Self::needs_output`].
    pub fn sampling_at(&self, index: usize, output: &[TokenId]) -> Arc<SamplingParams> {
        let params = match index < self.min_tokens {
            true => &self.early_sampling,
            false => &self.sampling,
        };
        let ends = |word: &Vec<TokenId>| {
            let (&last, before) = word.split_last()?;
            output.ends_with(before).then_some(last)
        };
        let mut banned = self.banned_words.iter().filter_map(ends).peekable();
        match banned.peek() {
            None => Arc::clone(params),
            Some(_) => Arc::new(params.banning(banned)),
        }
    }

    /// True if sampling depends on the value of the previous token.
    pub fn needs_output(&self) -> bool {
        self.sampling.needs_history() || !self.banned_words.is_empty()
    }

    /// Seed of this request's random draws.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Generation ends after any of these.
    pub fn stop_token_ids(&self) -> &[TokenId] {
        &self.stop_token_ids
    }

    /// Takes the constraints on the output, in their initial state.
    pub fn take_constraints(&mut self) -> Constraints {
        std::mem::take(&mut self.constraints)
    }

    /// `Some(k)`: the prompt's tokens are scored, with the `k` likeliest at each place.
    pub fn prompt_logprobs(&self) -> Option<usize> {
        self.prompt_logprobs
    }

    /// Salt of the prefix cache, which is shared only with requests of the same salt.
    pub fn cache_salt(&self) -> Option<&str> {
        self.cache_salt.as_deref()
    }

    /// Pooling of an embedding request; `None` if tokens are generated.
    pub fn pooling(&self) -> Option<Pooling> {
        self.pooling
    }

    /// True if every prompt token must be computed, whatever the prefix cache holds.
    pub fn needs_every_row(&self) -> bool {
        self.pooling.is_some_and(Pooling::needs_every_row)
    }

    /// Priority: requests with lower values are admitted earlier.
    pub fn priority(&self) -> i64 {
        self.priority
    }

    /// Tenant, for fair queueing.
    pub fn tenant(&self) -> TenantId {
        self.tenant
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Progress;

    const LIMITS: Limits = Limits {
        max_model_len: 16,
        kv_capacity_tokens: 12,
        vocab_size: 10,
        images: None,
    };

    fn request(prompt: usize, max_tokens: Option<usize>) -> Result<Request, RequestError> {
        let options = RequestOptions {
            prompt: vec![1; prompt],
            max_tokens,
            ..Default::default()
        };
        Request::new(RequestId(0), options, &LIMITS)
    }

    #[test]
    fn lengths_are_bounded_by_model_and_kv() {
        assert_eq!(request(4, None).unwrap().max_tokens(), 8);
        assert_eq!(request(4, Some(8)).unwrap().max_tokens(), 8);
        assert_eq!(
            request(4, Some(9)).unwrap_err(),
            RequestError::TooLong {
                prompt: 4,
                output: 9,
                limit: 12
            }
        );
        assert_eq!(
            request(12, None).unwrap_err(),
            RequestError::TooLong {
                prompt: 12,
                output: 1,
                limit: 12
            }
        );
        assert_eq!(request(0, None).unwrap_err(), RequestError::EmptyPrompt);
        assert!(matches!(request(4, Some(0)), Err(RequestError::Param(e)) if e.param == "max_tokens"));
    }

    #[test]
    fn a_prompt_to_be_scored_needs_no_output() {
        let scored = |prompt, k| {
            let options = RequestOptions {
                prompt: vec![1; prompt],
                max_tokens: Some(0),
                prompt_logprobs: Some(k),
                ..Default::default()
            };
            Request::new(RequestId(0), options, &LIMITS)
        };
        let request = scored(12, 20).unwrap();
        assert_eq!((request.max_tokens(), request.longest()), (0, 12));
        assert_eq!(
            request.prompt_logprobs(),
            Some(10),
            "no more than the vocabulary has"
        );
        assert!(matches!(
            scored(13, 0),
            Err(RequestError::TooLong { output: 0, .. })
        ));
        assert!(matches!(scored(1, 21), Err(RequestError::Param(e)) if e.param == "prompt_logprobs"));
    }

    #[test]
    fn a_pooled_request_generates_nothing() {
        let pooled = |prompt: usize| {
            let options = RequestOptions {
                prompt: vec![1; prompt],
                pooling: Some(Pooling::Mean),
                ..Default::default()
            };
            Request::new(RequestId(0), options, &LIMITS)
        };
        let whole = pooled(12).unwrap();
        assert_eq!((whole.max_tokens(), whole.longest()), (0, 12));
        let error = pooled(13).unwrap_err().to_string();
        assert!(
            error.ends_with("is 12 tokens, but there are 13 tokens"),
            "{error}"
        );
        assert_eq!(pooled(0).unwrap_err(), RequestError::EmptyPrompt);
    }

    #[test]
    fn tokens_must_be_in_the_vocabulary() {
        let options = RequestOptions {
            prompt: vec![10],
            ..Default::default()
        };
        let error = Request::new(RequestId(0), options, &LIMITS).unwrap_err();
        assert_eq!(
            error,
            RequestError::UnknownToken {
                token: 10,
                vocab_size: 10
            }
        );
    }

    fn banning(bans: Bans) -> Result<Request, RequestError> {
        let options = RequestOptions {
            prompt: vec![1, 2],
            max_tokens: Some(4),
            stop_token_ids: vec![9],
            bans,
            ..Default::default()
        };
        Request::new(RequestId(0), options, &LIMITS)
    }

    fn banned(request: &Request, output: &[TokenId]) -> Vec<TokenId> {
        let params = request.sampling_at(output.len(), output);
        assert!(params.logit_bias().iter().all(|&(_, bias)| bias < -1e29));
        params.logit_bias().iter().map(|&(token, _)| token).collect()
    }

    #[test]
    fn what_is_banned_depends_on_the_place() {
        let request = banning(Bans {
            min_tokens: 2,
            words: [vec![7], vec![3, 4], vec![3, 3, 5]].into(),
            ..Default::default()
        });
        let request = request.unwrap();
        assert!(request.needs_output());
        assert_eq!(banned(&request, &[]), [7, 9]);
        assert_eq!(banned(&request, &[3]), [4, 7, 9]);
        assert_eq!(banned(&request, &[3, 3]), [4, 5, 7]);
        assert_eq!(banned(&request, &[3, 3, 1]), [7]);
        let allowed = banning(Bans {
            allowed: Some(vec![8, 0, 8]),
            ..Default::default()
        });
        let mut allowed = allowed.unwrap();
        assert!(!allowed.needs_output() && banned(&allowed, &[1]).is_empty());
        let (mut constraints, mut mask) = (allowed.take_constraints(), [0]);
        for token in [8, 0] {
            constraints.fill(&mut mask);
            assert_eq!(mask, [1 << 8 | 1]);
            assert_eq!(constraints.accept(token), Ok(Progress::Open));
        }
        let one = banning(Bans {
            words: [vec![7]].into(),
            ..Default::default()
        });
        assert!(!one.unwrap().needs_output(), "it is banned everywhere");
        assert!(banned(&banning(Bans::default()).unwrap(), &[1]).is_empty());
    }

    #[test]
    fn a_token_has_one_bias_however_often_it_is_named() {
        let options = RequestOptions {
            prompt: vec![1],
            max_tokens: Some(4),
            sampling: SamplingOptions {
                logit_bias: vec![(7, 1.0), (3, 2.0), (7, 0.5), (9, 5.0)],
                ..Default::default()
            },
            stop_token_ids: vec![9, 9],
            bans: Bans {
                min_tokens: 1,
                words: [vec![9], vec![2, 9], vec![9]].into(),
                ..Default::default()
            },
            ..Default::default()
        };
        let request = Request::new(RequestId(0), options, &LIMITS).unwrap();
        for (index, output) in [(0, vec![]), (1, vec![2]), (2, vec![2, 2])] {
            let params = request.sampling_at(index, &output);
            let [three, seven, (9, ban)] = params.logit_bias() else {
                panic!("{params:?}");
            };
            assert_eq!((*three, *seven), ((3, 2.0), (7, 1.5)));
            assert!(ban.is_finite() && *ban < -1e29);
        }
    }

    #[test]
    fn bans_name_what_is_wrong_with_them() {
        let wrong = |bans| match banning(bans) {
            Err(RequestError::Param(error)) => error.param,
            other => panic!("{other:?}"),
        };
        let bans = Bans::default;
        assert_eq!(
            wrong(Bans {
                min_tokens: 5,
                ..bans()
            }),
            "min_tokens"
        );
        let allowed = |tokens| Bans {
            allowed: Some(tokens),
            ..bans()
        };
        assert_eq!(wrong(allowed(vec![])), "allowed_token_ids");
        assert_eq!(wrong(allowed(vec![10])), "allowed_token_ids");
        assert_eq!(
            wrong(Bans {
                words: [vec![10]].into(),
                ..bans()
            }),
            "bad_words"
        );
    }
}
