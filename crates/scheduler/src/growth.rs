//! How many tokens the requests that run will hold before they end, so that admitting a request does not soon preempt others.
//!
//! As the Past-Future scheduler does it (arXiv:2507.10150): outputs are likely to become as long as those of requests that ended, and
//! what all requests hold at the end of each of them follows. Blocks that several requests share count for each of them.

use std::cmp::Reverse;

use crate::sequence::Sequence;

/// How long outputs are likely to become.
#[derive(Debug)]
pub(crate) struct Forecast {
    /// In ascending order.
    lengths: Vec<usize>,
    /// Of the lengths from each on.
    sums: Vec<usize>,
}

/// From the lengths of outputs that ended, in tokens.
impl FromIterator<usize> for Forecast {
    fn from_iter<I: IntoIterator<Item = usize>>(lengths: I) -> Self {
        let mut lengths: Vec<usize> = lengths.into_iter().collect();
        lengths.sort_unstable();
        let mut sums = vec![0; lengths.len() + 1];
        for (at, length) in lengths.iter().enumerate().rev() {
            sums[at] = sums[at + 1] + length;
        }
        Self { lengths, sums }
    }
}

impl Forecast {
    /// Tokens that follow an output of so many, at most `most`: the mean of what followed in outputs that were longer. Where none was,
    /// as many again.
    fn more(&self, outputs: usize, most: usize) -> usize {
        let longer = self.lengths.partition_point(|length| *length <= outputs);
        let more = match self.lengths.len() - longer {
            0 => outputs,
            count => self.sums[longer].div_ceil(count) - outputs,
        };
        more.min(most)
    }

    /// What a request holds, and what it is likely to get.
    pub(crate) fn of(&self, sequence: &Sequence) -> Growing {
        let outputs = sequence.outputs();
        let most = sequence.request.max_tokens().saturating_sub(outputs);
        Growing {
            held: sequence.tokens.len(),
            more: self.more(outputs, most),
        }
    }
}

/// Running requests, taken to generate a token in each step until they end.
#[derive(Debug)]
pub(crate) struct Growth {
    /// The longest-lived first.
    requests: Vec<Growing>,
    /// Tokens that all of them hold.
    held: usize,
}

/// One of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growing {
    /// Tokens that it holds.
    pub(crate) held: usize,
    /// Tokens that it still gets.
    pub(crate) more: usize,
}

impl FromIterator<Growing> for Growth {
    fn from_iter<I: IntoIterator<Item = Growing>>(requests: I) -> Self {
        let mut requests: Vec<Growing> = requests.into_iter().collect();
        requests.sort_unstable_by_key(|request| Reverse(request.more));
        let held = requests.iter().map(|request| request.held).sum();
        Self { requests, held }
    }
}

impl Growth {
    /// Adds one, and says how many tokens all hold together beyond what they hold now, at the worst time before it ends.
    pub(crate) fn add(&mut self, newcomer: Growing) -> usize {
        let longer = self.requests.partition_point(|other| other.more > newcomer.more);
        self.requests.insert(longer, newcomer);
        self.held += newcomer.held;
        // Before the end of each, those that live as long or longer have grown by what it gets, and the others have ended.
        let mut left = self.held
            - self.requests[..longer]
                .iter()
                .map(|request| request.held)
                .sum::<usize>();
        let ends = self
            .requests
            .iter()
            .enumerate()
            .skip(longer)
            .map(|(at, request)| {
                left -= request.held;
                ((at + 1) * request.more).saturating_sub(left)
            });
        ends.max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::population::{MOST_ENDED, Population};

    #[test]
    fn outputs_become_as_long_as_others_did() {
        let mut population = Population::default();
        let more = |population: &Population, so_far, most| {
            let forecast: Forecast = population.outputs().collect();
            forecast.more(so_far, most)
        };
        assert_eq!(more(&population, 0, 100), 0, "nothing is known");
        assert_eq!(more(&population, 30, 100), 30, "as many again");
        [10, 20, 60]
            .into_iter()
            .for_each(|tokens| population.ended(5, tokens));
        assert_eq!(more(&population, 0, 100), 30);
        assert_eq!(more(&population, 10, 100), 30, "of 20 and 60");
        assert_eq!(more(&population, 59, 100), 1);
        assert_eq!(more(&population, 60, 100), 60);
        assert_eq!(more(&population, 60, 5), 5);
        (0..MOST_ENDED).for_each(|_| population.ended(5, 7));
        assert_eq!(more(&population, 0, 100), 7, "the others are forgotten");
    }

    fn growing() -> impl Strategy<Value = Growing> {
        (0_usize..50, 0_usize..30).prop_map(|(held, more)| Growing { held, more })
    }

    proptest! {
        /// Beside requests that are stepped one token at a time.
        #[test]
        fn the_peak_is_what_all_hold_at_the_worst_time(others in prop::collection::vec(growing(), 0..12), newcomer in growing()) {
            let mut growth: Growth = others.iter().copied().collect();
            let all: Vec<Growing> = others.iter().copied().chain([newcomer]).collect();
            let now: usize = all.iter().map(|request| request.held).sum();
            // Those that get nothing more end before the first step.
            let at = |step: usize| -> usize {
                let alive = all.iter().filter(|request| request.more >= step);
                alive.map(|request| request.held + step).sum()
            };
            let peak = (0..=newcomer.more).map(at).max().unwrap_or(0);
            prop_assert_eq!(growth.add(newcomer), peak - now);
        }
    }
}
