use plimsoll_core::{
    FinishReason, ImageSpan, Logprobs, Pooling, Progress, PromptLogprob, Request, SampleSpec, Sampled,
    SamplingParams, TokenId, TokenLogprob, mask,
};

use crate::quote::Quote;

/// Hash of all tokens up to some position: what a KV slot of the simulated device holds; and the last `<say>` in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    hash: u64,
    quote: Quote,
}

impl Context {
    /// No token yet.
    pub const EMPTY: Self = Self::new(0x706c_696d_736f_6c6c);

    /// What no sequence of tokens leads to, but by chance.
    pub(crate) const GARBAGE: Self = Self::new(0);

    /// What is not finite stays so, whatever comes behind it.
    pub(crate) const NOT_FINITE: Self = Self::new(u64::MAX);

    const fn new(hash: u64) -> Self {
        Self {
            hash,
            quote: Quote::NONE,
        }
    }

    /// The context after `tokens`.
    pub fn of(tokens: &[TokenId]) -> Self {
        Self::with_images(tokens, &[])
    }

    /// The same where some of them are rows of images.
    pub fn with_images(tokens: &[TokenId], images: &[ImageSpan]) -> Self {
        let mut context = Self::EMPTY;
        for (position, &token) in tokens.iter().enumerate() {
            context = context.then_at(position, token, images);
        }
        context
    }

    /// This context with one more token, at `position` of a prompt with `images`: rows of an image count by its content.
    pub fn then_at(self, position: usize, token: TokenId, images: &[ImageSpan]) -> Self {
        let after = self.then(token);
        if after == Self::NOT_FINITE {
            return after;
        }
        let image = images
            .iter()
            .find(|span| (span.start..span.end()).contains(&position));
        let Some(span) = image else { return after };
        let words = span.image.hash.as_chunks::<8>().0.iter();
        let row = (position - span.start + span.first + 1) as u64;
        Self {
            hash: words.fold(mix(after.hash ^ row), |hash, &word| {
                mix(hash ^ u64::from_le_bytes(word))
            }),
            ..after
        }
    }

    /// This context with one more token.
    pub fn then(self, token: TokenId) -> Self {
        if self == Self::NOT_FINITE {
            return self;
        }
        Self {
            hash: mix(self.hash ^ (u64::from(token) + 1)),
            quote: self.quote.then(token),
        }
    }

    /// A number that looks random.
    pub(crate) fn draw(self) -> u64 {
        mix(self.hash)
    }
}

/// A language model whose next token is a pure function of the whole context and of how it is sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimModel {
    vocab_size: usize,
    /// Bytes to draw from; all tokens where empty.
    alphabet: &'static [u8],
}

/// Letters by their frequency in English, spaces and punctuation.
const LETTERS: &[u8] = b"eeeeeetttttaaaaooooiiinnnsssrrhhddllucmwfgypbvk          ,.";

impl SimModel {
    /// Ends a text: the token after the 256 bytes.
    pub const END: TokenId = 256;
    /// Elements of a row behind the last norm.
    pub const WIDTH: usize = 16;
    /// Tokens of a simulated text on average; then comes [`Self::END`].
    const MEAN_TEXT: u64 = 64;

    /// Every token is as likely as any other.
    pub fn uniform(vocab_size: usize) -> Self {
        Self {
            vocab_size,
            alphabet: &[],
        }
    }

    /// Speaks printable bytes, and [`Self::END`] now and then: for serving with a byte tokenizer. Asked by a prompt that holds
    /// `<say>some text</say>`, it says that text (the last such), so that tests of what is made of answers can choose them.
    pub fn text() -> Self {
        Self {
            vocab_size: Self::END as usize + 1,
            alphabet: LETTERS,
        }
    }

    /// Token ids lie below it.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The token after `context`, among those of the mask if there is one; a model that speaks in bytes then takes care that
    /// what it opened is closed. A `logit_bias` of 100 forces and one of -100 bans
    /// a token; logprobs are made up.
    pub fn sample(&self, context: Context, spec: &SampleSpec, mask: Option<&[u32]>) -> Sampled {
        let params = &spec.params;
        let mut draw = mix(context.hash ^ mix(spec.index as u64 + 1) ^ fingerprint(params));
        if !params.is_greedy() {
            draw = mix(draw ^ spec.seed);
        }
        let forced: Vec<_> = params
            .logit_bias()
            .iter()
            .filter(|(token, bias)| *bias >= 100.0 && is_allowed(mask, *token))
            .collect();
        let mut token = match mask {
            Some(_) if !self.alphabet.is_empty() && draw.is_multiple_of(8) => {
                closing(mask).unwrap_or_else(|| self.token(draw))
            }
            _ => self.token(draw),
        };
        if forced.is_empty() {
            let banned = |token| {
                let biases = params.logit_bias();
                !is_allowed(mask, token) || biases.iter().any(|&(t, bias)| t == token && bias <= -100.0)
            };
            // If everything is banned, some token is still returned.
            for _ in 0..64 {
                if !banned(token) {
                    break;
                }
                draw = mix(draw);
                token = self.token(draw);
            }
            if !is_allowed(mask, token) {
                let all = 0..self.vocab_size as TokenId;
                let allowed: Vec<_> = all.filter(|&token| is_allowed(mask, token)).collect();
                token = allowed[(draw % allowed.len() as u64) as usize];
            }
        } else {
            token = forced[(draw % forced.len() as u64) as usize].0;
        }
        self.sampled(token, params)
    }

    /// The token after `context`: the next one of the text between `<say>` and `</say>`, if there is one and the mask allows
    /// it, else that of [`Self::sample`].
    pub fn say(
        &self,
        context: Context,
        spec: &SampleSpec,
        mask: Option<&[u32]>,
        token_at: impl FnOnce(usize) -> TokenId,
    ) -> Sampled {
        let span = context.quote.last.filter(|_| !self.alphabet.is_empty());
        let wanted = span.map(|span| match span.start as usize + spec.index {
            position if position < span.end as usize => token_at(position),
            _ => Self::END,
        });
        match wanted.filter(|&token| is_allowed(mask, token)) {
            Some(token) => self.sampled(token, &spec.params),
            None => self.sample(context, spec, mask),
        }
    }

    /// `token` with the logprobs that were asked for.
    fn sampled(&self, token: TokenId, params: &SamplingParams) -> Sampled {
        let logprobs = params.logprobs().map(|k| self.logprobs(token, k));
        Sampled { token, logprobs }
    }

    /// The row behind the last norm of the last token of `context`: short fractions, whose sums are exact.
    pub fn row(context: Context) -> [f64; Self::WIDTH] {
        let mut draw = context.hash;
        std::array::from_fn(|_| {
            draw = mix(draw);
            (draw % 2049) as f64 / 1024.0 - 1.0
        })
    }

    fn token(&self, draw: u64) -> TokenId {
        if self.alphabet.is_empty() {
            (draw % self.vocab_size as u64) as TokenId
        } else if draw.is_multiple_of(Self::MEAN_TEXT) {
            Self::END
        } else {
            TokenId::from(self.alphabet[(draw / Self::MEAN_TEXT) as usize % self.alphabet.len()])
        }
    }

    /// How likely `token` is after `context`, which makes another token the likeliest each time.
    pub fn score(&self, context: Context, token: TokenId, k: usize) -> PromptLogprob {
        let vocab = self.vocab_size;
        let likeliest = self.token(mix(context.hash));
        let worse = (token as usize + vocab - likeliest as usize) % vocab;
        PromptLogprob {
            token,
            logprob: made_up(worse),
            rank: worse as u32 + 1,
            top: self.top(likeliest, k),
        }
    }

    /// The sampled token is the likeliest.
    fn logprobs(&self, token: TokenId, k: usize) -> Logprobs {
        Logprobs {
            sampled: made_up(0),
            top: self.top(token, k),
        }
    }

    /// A token and its successors, which follow at falling odds.
    fn top(&self, likeliest: TokenId, k: usize) -> Vec<TokenLogprob> {
        let vocab = self.vocab_size;
        let top = (0..k.min(vocab)).map(|worse| TokenLogprob {
            token: ((likeliest as usize + worse) % vocab) as TokenId,
            logprob: made_up(worse),
        });
        top.collect()
    }
}

/// Log-probability of the token with this many likelier ones.
fn made_up(worse: usize) -> f32 {
    -0.5 - worse as f32
}

fn images(request: &Request) -> &[ImageSpan] {
    request.images().map_or(&[], |images| &images[..])
}

/// What `model` says about the prompt of `request`, by the definition; nothing where it does not ask.
pub fn score_oracle(model: &SimModel, request: &Request) -> Vec<PromptLogprob> {
    let Some(top) = request.prompt_logprobs() else {
        return Vec::new();
    };
    let prompt = request.prompt();
    (1..prompt.len())
        .map(|at| {
            model.score(
                Context::with_images(&prompt[..at], images(request)),
                prompt[at],
                top,
            )
        })
        .collect()
}

/// What ends the text or a part of it, as JSON has them: a bracket, or within a string, where all may stand, a quotation mark.
fn closing(mask: Option<&[u32]>) -> Option<TokenId> {
    let allows = |byte: u8| is_allowed(mask, byte.into());
    let token = match (allows(b']'), allows(b'}')) {
        _ if is_allowed(mask, SimModel::END) => SimModel::END,
        (true, false) => b']'.into(),
        (false, true) => b'}'.into(),
        _ if allows(b'"') => b'"'.into(),
        _ => return None,
    };
    Some(token)
}

fn is_allowed(mask: Option<&[u32]>, token: TokenId) -> bool {
    mask.is_none_or(|mask| mask::allows(mask, token))
}

/// What `model` answers to `request`, and why it ends, by the definition: token after token, with no scheduler, batch or cache.
pub fn oracle(model: &SimModel, request: &Request) -> (Vec<TokenId>, FinishReason) {
    let mut constraints = request.clone().take_constraints();
    let constrained = !constraints.is_free();
    let mut mask = vec![0; mask::words(model.vocab_size())];
    let mut context = Context::with_images(request.prompt(), images(request));
    let mut output = Vec::new();
    while output.len() < request.max_tokens() {
        let spec = SampleSpec {
            params: request.sampling_at(output.len(), &output),
            seed: request.seed(),
            index: output.len(),
            history: Vec::new(),
            prompt_len: request.prompt().len(),
            constrained,
        };
        constraints.fill(&mut mask);
        let mask = constrained.then_some(mask.as_slice());
        let token_at = |position: usize| request.prompt()[position];
        let token = model.say(context, &spec, mask, token_at).token;
        output.push(token);
        if request.stop_token_ids().contains(&token) {
            return (output, FinishReason::Stop);
        }
        if constraints.accept(token) == Ok(Progress::Complete) {
            return (output, FinishReason::Complete);
        }
        context = context.then(token);
    }
    (output, FinishReason::Length)
}

/// The vector that `request` is answered with, by the definition; `None` where it generates.
pub fn pooled_oracle(request: &Request) -> Option<Vec<f32>> {
    let pooling = request.pooling()?;
    let mut context = Context::EMPTY;
    let rows = request.prompt().iter().enumerate().map(|(position, &token)| {
        context = context.then_at(position, token, images(request));
        SimModel::row(context)
    });
    let rows: Vec<_> = rows.collect();
    let rows = match pooling {
        Pooling::Last => &rows[rows.len() - 1..],
        Pooling::Mean => &rows[..],
    };
    let mean = |i: usize| (rows.iter().map(|row| row[i]).sum::<f64>() / rows.len() as f64) as f32;
    Some((0..SimModel::WIDTH).map(mean).collect())
}

/// Parameters change the text, so that a mix-up between requests shows.
fn fingerprint(params: &SamplingParams) -> u64 {
    [
        params.temperature(),
        params.top_p(),
        params.min_p(),
        params.presence_penalty(),
        params.frequency_penalty(),
        params.repetition_penalty(),
    ]
    .iter()
    .fold(params.top_k() as u64, |hash, value| {
        mix(hash ^ u64::from(value.to_bits()))
    })
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood 2014): each bit of the input moves half of the output's.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
