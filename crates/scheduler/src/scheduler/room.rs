//! How much of what there is to compute goes into the next step.

use std::ops::Range;

use plimsoll_core::{ImageSpan, Request};
use plimsoll_kv::{BlockTable, KvManager};

use super::{Scheduler, images::StepImage};
use crate::{Load, sequence::Running};

/// What is left of a step while it is planned.
#[derive(Clone, Debug)]
pub(super) struct Room {
    /// Tokens.
    tokens: usize,
    /// Of these, tokens of prompts.
    prompts: usize,
    pub(super) image: StepImage,
}

impl Room {
    /// How many of the tokens of a request that are ready are computed.
    pub(super) fn take(&mut self, running: &Running, kv: &KvManager) -> usize {
        let (ready, generates) = (running.ready(), running.generates());
        let len = match generates {
            true => ready.min(self.tokens),
            false => self.of_prompt(
                &running.sequence.request,
                &running.table,
                running.planned,
                ready,
                kv,
            ),
        };
        self.tokens -= len;
        self.prompts = self.prompts.saturating_sub(if generates { 0 } else { len });
        len
    }

    /// How many of the `ready` tokens behind `start` are computed, of a prompt or of an answer that is computed again; 0 if they must
    /// wait for a later step.
    pub(super) fn of_prompt(
        &mut self,
        request: &Request,
        table: &BlockTable,
        start: usize,
        ready: usize,
        kv: &KvManager,
    ) -> usize {
        let room = ready.min(self.for_prompts());
        let end = self.end_of(request, start, start + ready);
        match kv.cut(table, start, end) - start {
            // Two images have rows in this chunk, and a step has rows of one: it ends before the second.
            0 if end < start + room && spans_in(request, start..end).next().is_some() => end - start,
            len => len,
        }
    }

    /// Where a run from `start` on that ends at most at `end` must end for the sake of images.
    fn before_other_images(&mut self, request: &Request, start: usize, end: usize) -> usize {
        let mut here = spans_in(request, start..end);
        let other = here.find(|span| !self.image.may_read(&span.image));
        other.map_or(end, |span| span.start.max(start))
    }

    /// Where a run of a prompt from `start` on ends that could end at `ready`; at `start` if it must wait for a later step.
    ///
    /// Where tokens of a span see each other, it is computed at once: before what is left of it that does not fit the step. The
    /// prompts' share of a step may be smaller than a span, and then gives way to the first of them, lest it never be computed.
    fn end_of(&mut self, request: &Request, start: usize, ready: usize) -> usize {
        let most = ready.min(start + self.for_prompts());
        let end = self.before_other_images(request, start, most);
        let spans = request.images().filter(|_| request.has_mutual_spans());
        let cut = spans.and_then(|spans| spans.iter().find(|span| span.is_cut_at(end)));
        match cut {
            None => end,
            Some(span) if span.start > start => span.start,
            Some(span) if end > start && span.end() <= start + self.tokens => span.end(),
            Some(_) => start,
        }
    }

    /// Tokens of prompts that still fit.
    pub(super) fn for_prompts(&self) -> usize {
        self.tokens.min(self.prompts)
    }
}

/// The images that have rows among these tokens.
fn spans_in(request: &Request, tokens: Range<usize>) -> impl Iterator<Item = &ImageSpan> {
    let images = request.images().map_or(&[][..], |images| &images[..]);
    images
        .iter()
        .filter(move |span| !span.rows_in(&tokens).is_empty())
}

impl Scheduler {
    /// Size of the next step.
    pub(super) fn room(&self) -> Room {
        let tokens = self.limits.max_num_batched_tokens;
        let (prompts, encode) = match &self.prompt_budget {
            None => (tokens, None),
            Some(budget) => {
                let load = self.load();
                // Those whose token the step does not compute wait for it too.
                let readers = self.running.values().filter(|running| running.generates());
                let decoding = load.decoding.max(readers.count());
                let encode = budget.encode_time(&Load { decoding, ..load });
                (budget.prompt_tokens(&load), encode)
            }
        };
        Room {
            tokens,
            prompts,
            image: StepImage::none(self.images, encode),
        }
    }

    /// What the next step could compute.
    fn load(&self) -> Load {
        let mut load = Load {
            encoding: self.images.is_encoding(),
            ..Load::default()
        };
        for running in self.running.values().filter(|running| running.ready() > 0) {
            if running.generates() {
                load.decoding += 1;
                load.context += running.planned;
            } else {
                load.prompts += 1;
                load.next_prompt = load.next_prompt.max(running.sequence.tokens.len());
            }
        }
        load.steady = self.population.steady(load.prompts + self.waiting.len());
        if self.short_of_blocks {
            return load;
        }
        let free = self.limits.max_num_seqs.saturating_sub(self.running.len());
        load.prompts += self.waiting.len().min(free);
        if load.next_prompt == 0 && load.prompts > 0 {
            let lowest = self.running.first_key_value().map(|(rank, _)| rank.class);
            let next = self.waiting.next(self.counters.admissions, lowest);
            load.next_prompt = next.map_or(0, |next| self.waiting.peek(next).tokens.len());
        }
        load
    }

    /// Slots behind the last token of a running request. The token sampled last may have none yet.
    pub(super) fn tail(&self, running: &Running) -> usize {
        let slots = running.table.room(&self.kv.config());
        slots.saturating_sub(running.planned.max(running.sequence.tokens.len()))
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_core::{
        BlockSize, CacheGroups, KvConfig, Limits, RequestId, RequestOptions, Sampled, StepLimits, StepOutput,
    };

    use super::*;
    use crate::{Ended, SchedulerConfig};

    #[test]
    fn what_the_prefix_cache_has_of_a_prompt_counts_for_nothing() {
        let mut scheduler = Scheduler::new(SchedulerConfig {
            limits: StepLimits {
                max_num_batched_tokens: 64,
                max_num_seqs: 4,
                max_model_len: 64,
            },
            kv: KvConfig {
                block_size: BlockSize::new(8).unwrap(),
                num_pages: 16,
                groups: CacheGroups::default(),
                state_slots: 0,
            },
            state_chunk: 1,
            enable_prefix_caching: true,
            patience: 20,
        });
        let limits = Limits {
            max_model_len: 64,
            kv_capacity_tokens: 128,
            vocab_size: 100,
            images: None,
        };
        let request = |id| {
            let options = RequestOptions {
                prompt: (0..20).collect(),
                max_tokens: Some(2),
                ..RequestOptions::default()
            };
            Request::new(RequestId(id), options, &limits).unwrap()
        };
        for id in 0..2 {
            scheduler.submit(request(id));
            while !scheduler.is_idle() {
                let plan = scheduler.plan();
                let sampled = Sampled {
                    token: 1,
                    logprobs: None,
                };
                let samples = plan.runs.iter().map(|_| Some(sampled.clone())).collect();
                let output = StepOutput {
                    samples,
                    ..StepOutput::default()
                };
                scheduler.apply(&plan, output);
            }
        }
        // The second one found two blocks.
        let expected = Ended {
            requests: 2,
            prompts: 20 + 4,
            outputs: 2 * 2,
        };
        assert_eq!(scheduler.population.steady(0), Some(expected));
    }
}
