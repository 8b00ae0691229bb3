use std::time::Instant;

use super::PerRequest;

/// Records the latencies of one request. Times are those at which the engine sent events, so that slow clients do not distort
/// them.
#[derive(Debug)]
pub(crate) struct Timer {
    metrics: PerRequest,
    prompt_tokens: usize,
    submitted: Instant,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Instant,
    tokens: usize,
    ended: bool,
}

impl Timer {
    /// For a request that was submitted at `submitted` and accepted.
    pub(crate) fn start(
        metrics: &PerRequest,
        prompt_tokens: usize,
        max_tokens: usize,
        submitted: Instant,
    ) -> Self {
        metrics.prompt.count(prompt_tokens);
        metrics.max_tokens.count(max_tokens);
        Self {
            metrics: metrics.clone(),
            prompt_tokens,
            submitted,
            admitted: None,
            first_token: None,
            last_token: submitted,
            tokens: 0,
            ended: false,
        }
    }

    /// The request was scheduled first; calls after preemptions are ignored.
    pub(crate) fn admitted(&mut self, at: Instant) {
        if self.admitted.is_none() {
            self.admitted = Some(at);
            self.metrics.queue.record(at - self.submitted);
            self.metrics
                .prompt_tokens
                .each(|counter| counter.increment(self.prompt_tokens as u64));
        }
    }

    /// When its first step began.
    fn begun(&self) -> Instant {
        self.admitted.unwrap_or(self.submitted)
    }

    /// A token was generated.
    pub(crate) fn token(&mut self, at: Instant) {
        if self.first_token.is_none() {
            self.first_token = Some(at);
            self.metrics.ttft.record(at - self.submitted);
            self.metrics.prefill.record(at - self.begun());
        } else {
            self.metrics.itl.record(at - self.last_token);
        }
        self.last_token = at;
        self.tokens += 1;
    }

    /// The embedding was computed.
    pub(crate) fn pooled(&mut self, at: Instant) {
        self.metrics.prefill.record(at - self.begun());
        self.finished(false, at);
    }

    /// The request finished; `at_length`: because of `max_tokens`.
    pub(crate) fn finished(&mut self, at_length: bool, at: Instant) {
        self.ended = true;
        if self.tokens == 0 {
            // Only its prompt was scored.
            self.last_token = at;
        }
        let metrics = &self.metrics;
        let ended = match at_length {
            true => &metrics.length,
            false => &metrics.stopped,
        };
        ended.each(|counter| counter.increment(1));
        metrics.generated.count(self.tokens);
        metrics.e2e.record(self.last_token - self.submitted);
        metrics.inference.record(self.last_token - self.begun());
        if let Some(first) = self.first_token {
            let decode = self.last_token - first;
            metrics.decode.record(decode);
            if self.tokens > 1 {
                metrics.tpot.record(decode / (self.tokens as u32 - 1));
            }
        }
    }

    /// The request's step failed.
    pub(crate) fn failed(&mut self) {
        self.ended = true;
        self.metrics.failed.each(|counter| counter.increment(1));
    }
}

impl Drop for Timer {
    /// An unfinished request was cancelled by its client.
    fn drop(&mut self) {
        if !self.ended {
            self.metrics.aborted.each(|counter| counter.increment(1));
        }
    }
}
