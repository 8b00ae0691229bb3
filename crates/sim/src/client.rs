//! A simulated client: what it expects to hear, and checks of what it hears.

use plimsoll_core::{FinishReason, PromptEvent, PromptLogprob, Request, TokenEvent, TokenId};

/// What a client expects, and what it has heard.
pub(crate) struct Client<'a> {
    pub(crate) request: &'a Request,
    /// Its expected text, and why it ends.
    pub(crate) oracle: (Vec<TokenId>, FinishReason),
    pub(crate) text: Vec<TokenId>,
    /// The expected logprobs of its prompt, and how many were reported.
    pub(crate) scores: Vec<PromptLogprob>,
    pub(crate) scored: usize,
    pub(crate) state: ClientState,
    pub(crate) admissions: u32,
    pub(crate) cached: usize,
    pub(crate) computed: usize,
    /// Requests whose blocks were back when this one was last admitted.
    pub(crate) freed_at_admission: u64,
    /// It had been admitted when the answer of a run was made not to be finite.
    pub(crate) is_suspect: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientState {
    Open,
    Finished(FinishReason),
    Pooled,
    Cancelled,
    Failed,
}

impl Client<'_> {
    pub(crate) fn hear_about_prompt(&mut self, event: &PromptEvent) -> Result<(), String> {
        let PromptEvent { logprobs, finish } = event;
        let expected = &self.scores[self.scored..];
        if !expected.starts_with(logprobs) {
            return Err(format!("hears {logprobs:?} about its prompt, not {expected:?}"));
        }
        self.scored += logprobs.len();
        match finish {
            Some(reason) => self.state = ClientState::Finished(*reason),
            None if logprobs.is_empty() => return Err("hears nothing about its prompt".into()),
            None => {}
        }
        Ok(())
    }

    pub(crate) fn hear(&mut self, event: &TokenEvent) -> Result<(), String> {
        let asked = self.request.sampling().logprobs();
        if event.logprobs.as_ref().map(|logprobs| logprobs.top.len()) != asked {
            return Err(format!(
                "asked for {asked:?} logprobs and got {:?}",
                event.logprobs
            ));
        }
        if self.scored < self.scores.len() {
            return Err("speaks before all is said about its prompt".into());
        }
        self.text.push(event.token);
        let (oracle, _) = &self.oracle;
        if !oracle.starts_with(&self.text) {
            return Err(format!("says {:?}, not {oracle:?}", self.text));
        }
        if let Some(reason) = event.finish {
            self.state = ClientState::Finished(reason);
        }
        Ok(())
    }

    pub(crate) fn check(&self, depth: usize) -> Result<(), String> {
        let reason = match self.state {
            ClientState::Finished(reason) => reason,
            ClientState::Pooled => return self.check_computed(self.request.prompt().len() - self.cached, 0),
            _ => return Ok(()),
        };
        if self.scored != self.scores.len() {
            return Err(format!("heard of {} prompt tokens alone", self.scored));
        }
        let (text, expected) = &self.oracle;
        if self.text != *text || reason != *expected {
            return Err(format!("ends with {:?} and {reason:?}, not {text:?}", self.text));
        }
        let stopped = reason != FinishReason::Length;
        // The last token is never computed, and the step planned before a stop was known is lost.
        let needed = self.request.prompt().len() + self.text.len().saturating_sub(1) - self.cached;
        let lost = usize::from(depth > 1 && stopped);
        self.check_computed(needed, lost)
    }

    /// Nothing is computed twice but after a preemption.
    fn check_computed(&self, needed: usize, lost: usize) -> Result<(), String> {
        if self.admissions == 1 && !(needed..=needed + lost).contains(&self.computed) {
            return Err(format!("computed {} tokens of {needed} needed", self.computed));
        }
        Ok(())
    }
}
