//! Whether requests come on top of those that are here, or take the places of others that ended.

use std::collections::VecDeque;

/// Requests that are remembered.
pub(crate) const MOST_ENDED: usize = 256;

/// Tells [`crate::PromptBudget`] what kind of load it has. A request that arrives while no more are present than lately takes the place of
/// one that ended, as where each client sends its next request when the last is answered (a closed loop). A flood or a burst raises the
/// recent maximum, or arrives when most of the others are gone.
#[derive(Clone, Debug, Default)]
pub struct Population {
    /// The recent maximum: the most requests present at once since fewer than half as many were present.
    most: usize,
    /// Requests that arrived since then.
    replaced: usize,
    /// Tokens of the prompts and outputs of those that ended last, without what the prefix cache had.
    ended: VecDeque<(usize, usize)>,
    /// Sums of these.
    sums: Ended,
}

/// Requests that ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// How many.
    pub requests: usize,
    /// Tokens of their prompts that were computed: without those that the prefix cache had.
    pub prompts: usize,
    /// Tokens of their outputs.
    pub outputs: usize,
}

impl Population {
    /// A request arrived; with it `present` are there.
    pub fn came(&mut self, present: usize) {
        if present > self.most {
            (self.most, self.replaced) = (present, 0);
        } else {
            self.replaced += 1;
        }
    }

    /// A request is gone; `present` are left.
    pub fn left(&mut self, present: usize) {
        if 2 * present < self.most {
            (self.most, self.replaced) = (present, 0);
        }
    }

    /// Records how many tokens of its prompt a request that ended had computed, and how many it generated.
    pub fn ended(&mut self, prompt: usize, output: usize) {
        self.ended.push_back((prompt, output));
        self.sums.requests += 1;
        self.sums.prompts += prompt;
        self.sums.outputs += output;
        if self.ended.len() > MOST_ENDED
            && let Some((prompt, output)) = self.ended.pop_front()
        {
            self.sums.requests -= 1;
            self.sums.prompts -= prompt;
            self.sums.outputs -= output;
        }
    }

    /// Tokens of the outputs of those that ended last.
    pub(crate) fn outputs(&self) -> impl Iterator<Item = usize> {
        self.ended.iter().map(|(_, output)| *output)
    }

    /// The requests that ended last, if each of the `waiting` takes the place of another.
    pub fn steady(&self, waiting: usize) -> Option<Ended> {
        (waiting <= self.replaced && self.sums.outputs > 0).then_some(self.sums)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `count` come, on top of `present`.
    fn come(population: &mut Population, present: usize, count: usize) {
        (1..=count).for_each(|more| population.came(present + more));
    }

    /// `count` of `present` end.
    fn end(population: &mut Population, present: usize, count: usize) {
        for gone in 1..=count {
            population.ended(512, 128);
            population.left(present - gone);
        }
    }

    #[test]
    fn clients_that_come_back_are_told_from_floods_and_bursts() {
        let mut population = Population::default();
        come(&mut population, 0, 64);
        assert_eq!(
            population.steady(64),
            None,
            "a flood, or the first requests of clients"
        );
        end(&mut population, 64, 20);
        come(&mut population, 44, 20);
        let ended = population.steady(20).unwrap();
        assert_eq!(
            (ended.requests, ended.prompts, ended.outputs),
            (20, 20 * 512, 20 * 128)
        );
        assert_eq!(population.steady(21), None, "one waits since the beginning");
        come(&mut population, 64, 30);
        assert_eq!(population.steady(30), None, "more than ever");
        end(&mut population, 94, 90);
        come(&mut population, 4, 60);
        assert_eq!(population.steady(60), None, "a burst into an empty server");
    }

    #[test]
    fn only_the_last_lengths_count() {
        let mut population = Population::default();
        (0..1000).for_each(|_| population.ended(9, 9));
        (0..MOST_ENDED).for_each(|_| population.ended(100, 10));
        let expected = Ended {
            requests: MOST_ENDED,
            prompts: 100 * MOST_ENDED,
            outputs: 10 * MOST_ENDED,
        };
        assert_eq!(population.steady(0), Some(expected));
    }
}
