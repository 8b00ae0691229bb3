use std::ops::Range;

use plimsoll_core::{
    ConstraintError, Constraints, FinishReason, Pooling, Progress, Request, Run, RunInput, SampleSpec,
    ScoreSpec, TokenId,
};
use plimsoll_kv::{BlockTable, KvManager, Sharing};

/// Position in the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Arrival(pub(crate) u64);

/// A request and its tokens so far.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) request: Request,
    /// Prompt, then output.
    pub(crate) tokens: Vec<TokenId>,
    /// Constraints on the next token.
    pub(crate) constraints: Constraints,
    /// Prompt tokens, from the second on, whose log-probabilities were sent.
    pub(crate) scored: usize,
    /// Order of arrival.
    pub(crate) arrival: Arrival,
    /// Number of admissions before it arrived.
    pub(crate) turns_before: u64,
    /// True if it was admitted before.
    pub(crate) has_run: bool,
}

impl Sequence {
    pub(crate) fn new(mut request: Request, arrival: Arrival, turns_before: u64) -> Self {
        let mut tokens = Vec::with_capacity(request.prompt().len() + request.max_tokens());
        tokens.extend_from_slice(request.prompt());
        let constraints = request.take_constraints();
        Self {
            request,
            tokens,
            constraints,
            scored: 0,
            arrival,
            turns_before,
            has_run: false,
        }
    }

    /// Whether it is admitted for the first time; asked once for each time.
    pub(crate) fn is_new(&mut self) -> bool {
        !std::mem::replace(&mut self.has_run, true)
    }

    pub(crate) fn outputs(&self) -> usize {
        self.tokens.len() - self.request.prompt().len()
    }

    /// Positions that are still to be computed for what they say about the prompt token after them.
    fn unscored(&self) -> Option<Range<usize>> {
        self.request.prompt_logprobs()?;
        let rows = self.scored..self.request.prompt().len() - 1;
        (!rows.is_empty()).then_some(rows)
    }

    /// What need not be computed if it is cached.
    pub(crate) fn sharing(&self) -> Sharing<'_> {
        Sharing {
            salt: self.request.cache_salt(),
            images: self.request.images(),
            most: match self.request.needs_every_row() {
                true => 0,
                false => self.unscored().map_or(usize::MAX, |rows| rows.start),
            },
            prompt: self.request.prompt().len(),
        }
    }

    /// What a run of the tokens `start..end` says about the prompt that the client does not know yet.
    fn score_spec(&self, start: usize, end: usize) -> Option<ScoreSpec> {
        let rows = self.unscored()?;
        let (from, to) = (rows.start.max(start), rows.end.min(end));
        (from < to).then(|| ScoreSpec {
            first: from - start,
            targets: self.request.prompt()[from + 1..to + 1].to_vec(),
            top: self.request.prompt_logprobs().unwrap_or(0),
        })
    }

    /// The prompt is computed up to `end`: `Some` where nothing more is wanted.
    pub(crate) fn computed(&self, end: usize) -> Option<FinishReason> {
        let is_scored = self.request.pooling().is_none() && self.request.max_tokens() == 0;
        (is_scored && end == self.tokens.len()).then_some(FinishReason::Length)
    }

    /// Appends a sampled token; `Some` where it is the last. An error ends the request: its constraints cannot be followed.
    pub(crate) fn push(&mut self, token: TokenId) -> Result<Option<FinishReason>, ConstraintError> {
        self.tokens.push(token);
        if let Some(failure) = self.constraints.failure() {
            return Err(failure.clone());
        }
        if self.request.stop_token_ids().contains(&token) {
            return Ok(Some(FinishReason::Stop));
        }
        Ok(match self.constraints.accept(token)? {
            Progress::Complete => Some(FinishReason::Complete),
            Progress::Open if self.outputs() == self.request.max_tokens() => Some(FinishReason::Length),
            Progress::Open => None,
        })
    }

    /// Follows the constraints by a token that [`Self::push`] is about to append.
    pub(crate) fn foresee(&mut self, token: TokenId) {
        if !self.request.stop_token_ids().contains(&token) {
            self.constraints.foresee(token);
        }
    }
}

/// A sequence that holds KV.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) sequence: Sequence,
    pub(crate) table: BlockTable,
    /// Tokens computed or in flight: where the next run starts.
    pub(crate) planned: usize,
    /// Steps in flight that have a run of this request.
    pub(crate) in_flight: usize,
    /// A token is being sampled in flight: it counts, but its value is not known here yet.
    pub(crate) sampling: bool,
    /// Prompt tokens found in the prefix cache.
    cached: usize,
    /// The same, until `Admitted` is sent.
    pub(crate) admitted: Option<usize>,
    /// Sum of the rows given out so far, where the request is pooled.
    pooled: Vec<f64>,
}

impl Running {
    pub(crate) fn new(sequence: Sequence, table: BlockTable) -> Self {
        let start = table.computed();
        let cached = start.min(sequence.request.prompt().len());
        Self {
            sequence,
            table,
            planned: start,
            in_flight: 0,
            sampling: false,
            cached,
            admitted: Some(cached),
            pooled: Vec::new(),
        }
    }

    /// Tokens of its prompt that were, or are to be, computed.
    pub(crate) fn computed_prompt(&self) -> usize {
        self.sequence.request.prompt().len() - self.cached
    }

    /// Tokens that a run could compute now, 0 where the request must wait for a step in flight.
    pub(crate) fn ready(&self) -> usize {
        if self.sampling {
            let request = &self.sequence.request;
            let ends = self.sequence.outputs() + 1 == request.max_tokens();
            usize::from(!ends && !request.needs_output())
        } else {
            self.sequence.tokens.len() - self.planned
        }
    }

    /// Whether the next run continues the output, by a single token.
    pub(crate) fn generates(&self) -> bool {
        self.sampling || (self.sequence.outputs() > 0 && self.planned + 1 == self.sequence.tokens.len())
    }

    /// Plans the next `len` tokens, at most [`Self::ready`]; the table has room for them.
    pub(crate) fn next_run(&mut self, len: usize, kv: &mut KvManager) -> Run {
        let start = self.planned;
        let end = start + len;
        let input = if self.sampling {
            RunInput::LastSampled
        } else {
            RunInput::Known(self.sequence.tokens[start..end].to_vec())
        };
        let known = self.sequence.tokens.len() + usize::from(self.sampling);
        let Sequence { request, .. } = &self.sequence;
        let pool = request
            .pooling()
            .filter(|pooling| end == known || pooling.needs_every_row());
        let sample = (end == known && request.max_tokens() > 0).then(|| self.sample_spec());
        let score = self.sequence.score_spec(start, end);
        self.planned = end;
        self.in_flight += 1;
        self.sampling = sample.is_some();
        Run {
            request: self.sequence.request.id(),
            start,
            input,
            images: self.sequence.request.images().cloned(),
            tables: self.table.up_to(end, &kv.config()),
            state: kv.next_state(&mut self.table, end),
            sample,
            score,
            pool,
        }
    }

    /// Takes in what a run that ends at `end` gave out of its rows; the whole vector once that was the last run.
    pub(crate) fn pool(&mut self, rows: Vec<f64>, end: usize) -> Option<Vec<f32>> {
        if self.pooled.is_empty() {
            self.pooled = rows;
        } else {
            self.pooled
                .iter_mut()
                .zip(rows)
                .for_each(|(sum, more)| *sum += more);
        }
        let request = &self.sequence.request;
        let tokens = request.prompt().len();
        let rows = match request.pooling() {
            Some(Pooling::Mean) => tokens as f64,
            Some(Pooling::Last) | None => 1.0,
        };
        (end == tokens).then(|| self.pooled.iter().map(|sum| (sum / rows) as f32).collect())
    }

    fn sample_spec(&self) -> SampleSpec {
        let Sequence {
            request,
            tokens,
            constraints,
            ..
        } = &self.sequence;
        let index = self.sequence.outputs() + usize::from(self.sampling);
        let params = request.sampling_at(index, &tokens[request.prompt().len()..]);
        let history = if params.needs_history() {
            tokens.clone()
        } else {
            Vec::new()
        };
        SampleSpec {
            params,
            seed: request.seed(),
            index,
            history,
            prompt_len: request.prompt().len(),
            constrained: !constraints.is_free(),
        }
    }
}
