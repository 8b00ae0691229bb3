//! How many tokens of prompts a step computes while others generate: the more, the cheaper each of them, and the longer everyone
//! who reads must wait.

use std::time::Duration;

use plimsoll_core::{EncodeCost, StepCosts};

use crate::Ended;

/// A choice of prompt tokens that costs at most this part more per token than the best one is as good. Times are not measured more exactly:
/// with half as much, chance would decide in which steps a burst is computed.
const TOLERANCE: f64 = 0.02;

/// How the prompts' share of a step's fixed time grows with the part of the requests that do not generate yet.
const SHARE_EXPONENT: f64 = 2.0;

/// With few prompts to compute, they may make a step this many times as long as without them.
const STRETCH: f64 = 2.0;

/// Added to [`STRETCH`], times the square root of how many requests wait for each one that generates. Each step in which a burst is
/// computed has outputs too, which delay the prompts that still wait: the fewer steps, the earlier the last of them is done.
const STRETCH_BY_BACKLOG: f64 = 13.0;

/// However cheap prompt tokens get in larger steps, a step takes at most this many times as long as the two above say, unless there is a
/// target. With many experts they get cheaper up to the largest step, which wins nothing while few requests wait.
const MOST_STRETCH: f64 = 2.0;

/// Among steady requests, a size of steps with which they take at most this part longer than with the best one is as good.
const STEADY_TOLERANCE: f64 = 0.02;

/// Steps of the bisection for the part of steps with prompts. The largest can take twenty times as long as one without, so that a thousandth
/// of them would count as much as [`STEADY_TOLERANCE`].
const STEADY_HALVINGS: usize = 16;

/// With one image to encode, a step in which requests generate may take this part longer.
const ENCODE_STRETCH: f64 = 0.2;

/// Added to [`ENCODE_STRETCH`], times the square root of how many others wait for each one that generates.
const ENCODE_STRETCH_BY_BACKLOG: f64 = 7.0;

/// GPUs compute products in tiles of about so many rows. Smaller steps have smaller tiles, and on CPUs there are none.
const TILE: usize = 128;

/// No prompt takes more steps than this, whatever a step may take, and no image.
const MOST_CHUNKS: usize = 256;

/// The rule by which [`crate::Scheduler`] decides how many tokens of prompts go into a step in which requests generate.
///
/// Throughput: such a step is computed anyway, so `P` prompt tokens beside `D` rows that generate cost what they add,
/// `mixed(D, P) - decode(D)` (Sarathi-Serve, arXiv:2403.02310, calls that piggybacking). Per token that falls with `P` as long as
/// the device is bound by reading weights, and rises after. But while `w` requests wait for their prompts, they do not
/// generate, and each step that passes meanwhile reads the weights for fewer rows than it could. So the part
/// `1 - (D / (D + w))^2` of a step's fixed time is the prompts' too: the longer the backlog, the larger the best `P`. The fixed time is
/// `decode(1)`, or more with experts ([`StepCosts::fixed_seconds`]).
///
/// Latency decides among all `P` that cost at most 2 % more per token than the best: the step shall take at most
/// `2 + 13 sqrt(w / D)` times as long as without prompts. If none is so short, it is the shortest of them, but at most what fits into twice
/// that time, and at least the smallest known size. If nothing generates, the smallest of them is taken, or the whole next prompt: the
/// first tokens come early, and requests that came together do not all end together.
///
/// The larger `P`, the more requests begin together, and so end together; where each is followed by another, as in a closed loop, the
/// next prompts come in a bunch again, and between the bunches steps have no prompts. So where all that wait take the places of others
/// ([`crate::Population`]), a step has at most the rows with which the present requests would go on steadily in nearly the least time. That
/// spreads a bunch, until prompts come one by one.
///
/// `D + P` is a size that was measured, or a power of two beyond or one and a half times that, up to the largest step: products are
/// computed in tiles of rows, so that one row more can cost a whole tile. On an H200 512 rows of an 8B model take 12 ms, and 544 to 640
/// rows 14. Under a target it can lie between.
///
/// The constants were chosen by simulation (`crates/sim/tests/prompt_budget`), all times are measured.
#[derive(Clone, Debug)]
pub struct PromptBudget {
    costs: StepCosts,
    /// Rows of the steps that are compared, in ascending order.
    sizes: Vec<usize>,
    /// Longest step in which requests generate, in seconds.
    target: Option<f64>,
    /// Rows of the largest step.
    most: usize,
    /// Prompts are computed in chunks of so many tokens.
    chunk: usize,
}

/// How long a step in which requests generate may encode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncodeTime {
    seconds: f64,
    /// The same in the step that begins an image: under a target, its prompts may take all the time that is left.
    first: f64,
    cost: EncodeCost,
}

impl EncodeTime {
    /// The part of an image of so many patches that this is enough for, of 1; `begun` is one of which a part is encoded.
    pub fn share(&self, patches: usize, begun: bool) -> f64 {
        let seconds = if begun { self.seconds } else { self.first };
        let share = seconds / self.cost.seconds(patches);
        share.clamp((MOST_CHUNKS as f64).recip(), 1.0)
    }
}

/// Tokens of prompts for a step.
struct Choice {
    tokens: usize,
    /// Seconds of the step, with short contexts.
    seconds: f64,
}

/// What there is to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that generate a token in the step.
    pub decoding: usize,
    /// Sum of their contexts, in tokens.
    pub context: usize,
    /// Requests with prompt tokens to compute that could be in the step.
    pub prompts: usize,
    /// Tokens of the prompt that is next.
    pub next_prompt: usize,
    /// The step is likely to encode a part of an image that was begun.
    pub encoding: bool,
    /// The requests that ended last, if all that wait take the places of others. Ignored under a target.
    pub steady: Option<Ended>,
}

/// The next size to compare beyond `rows` that were measured: a power of two, or half way from one to the next if that is in whole tiles.
/// With powers alone, a backlog that is somewhat too short for one is computed in steps of half as many rows.
fn larger_size(rows: usize) -> usize {
    let power = (rows + 1).next_power_of_two();
    let between = power / 4 * 3;
    match between > rows && between.is_multiple_of(TILE) {
        true => between,
        false => power,
    }
}

impl PromptBudget {
    /// For steps of at most `most` rows that take the time of `costs`. Steps in which requests generate shall take at most
    /// `target`, but no prompt takes more than 256 of them for that.
    pub fn new(costs: StepCosts, most: usize, target: Option<Duration>) -> Self {
        let mut sizes: Vec<usize> = costs.mixed().iter().map(|step| step.rows).collect();
        sizes.retain(|&rows| rows <= most);
        while let Some(&last) = sizes.last().filter(|&&last| last < most) {
            sizes.push(most.min(larger_size(last)));
        }
        Self {
            costs,
            sizes,
            target: target.map(|target| target.as_secs_f64()),
            most,
            chunk: 1,
        }
    }

    /// The same for prompts that are computed in chunks of so many tokens: a step has whole chunks of them, at least one.
    pub fn in_chunks_of(self, tokens: usize) -> Self {
        Self {
            chunk: tokens,
            ..self
        }
    }

    /// What it was made with.
    pub fn costs(&self) -> &StepCosts {
        &self.costs
    }

    /// Most prompt tokens of the next step, at least one unless requests that generate fill it.
    pub fn prompt_tokens(&self, load: &Load) -> usize {
        let Load {
            decoding,
            context,
            prompts,
            next_prompt,
            encoding,
            steady,
        } = *load;
        let room = self.most.saturating_sub(decoding);
        if prompts == 0 {
            return room;
        }
        let choices = self.choices(decoding);
        let (fewest, most) = self.cheap(&choices, decoding, prompts);
        if decoding == 0 {
            return fewest.max(next_prompt).min(room);
        }
        let read = self.costs.context_seconds() * context as f64;
        let within = |seconds: f64| {
            let mut fitting = choices
                .iter()
                .rev()
                .filter(|choice| choice.seconds + read <= seconds);
            fitting.next().map_or(0, |choice| choice.tokens)
        };
        let alone = self.costs.decode_seconds(decoding) + read;
        let stretch = STRETCH + STRETCH_BY_BACKLOG * (prompts as f64 / decoding as f64).sqrt();
        let tokens = within(stretch * alone).clamp(fewest, most);
        let least = next_prompt.div_ceil(MOST_CHUNKS).max(1);
        let least = least.next_multiple_of(self.chunk);
        let tokens = match self.target {
            None => {
                let tokens = tokens.min(within(MOST_STRETCH * stretch * alone));
                let steady = steady.map(|ended| self.steady_rows(load, &ended));
                let tokens = steady.map_or(tokens, |rows| tokens.min(rows.saturating_sub(decoding)));
                let enough = choices.iter().find(|choice| choice.tokens >= tokens.max(least));
                enough.map_or(least, |choice| choice.tokens)
            }
            Some(target) => {
                let encode = self.encode_time(load).filter(|_| encoding);
                let seconds = target - read - encode.map_or(0.0, |time| time.seconds);
                tokens.min(self.tokens_within(decoding, seconds)).max(least)
            }
        };
        tokens.min(room)
    }

    /// Rows of the largest known step of which a steady population is served at most 2 % slower than of the best, if each request that ends
    /// is followed by another like those that `ended`.
    ///
    /// Such a step has `P` tokens of `n` prompts beside `C - n` of the `C` requests, in the part `f` of all steps; others have `C` outputs.
    /// Meanwhile `n (f + f^2 / (2 - 2 f))` requests do not generate: one in service, and those that a queue with constant service times
    /// has (Pollaczek and Khinchine). As many prompts are computed as requests end: `f P` tokens for `k` times as many outputs, where `k`
    /// prompt tokens came with each. If a step is too small for that, all have prompts, beside as many outputs as they suffice for.
    fn steady_rows(&self, load: &Load, ended: &Ended) -> usize {
        let present = load.decoding + load.prompts;
        let ratio = ended.prompts.max(1) as f64 / ended.outputs as f64;
        let prompt = ended.prompts.max(1) as f64 / ended.requests as f64;
        let read = self.costs.context_seconds() * load.context as f64 / load.decoding.max(1) as f64;
        let alone = self.costs.decode_seconds(present) + read * present as f64;
        let mixed = |outputs: f64, tokens: f64| {
            self.costs.mixed_seconds(outputs as usize, tokens as usize) + read * outputs
        };
        // Seconds for each token of a prompt, with the outputs that follow.
        let cost = |rows: usize| {
            let (all, rows) = (present as f64, rows as f64);
            let tokens = rows - all;
            if tokens < ratio * all {
                let outputs = rows / (1.0 + ratio);
                return mixed(outputs, rows - outputs) / (rows - outputs);
            }
            let together = (tokens / prompt).clamp(1.0, all);
            let generating = |part: f64| all - together * (part + part * part / (2.0 * (1.0 - part)));
            let (mut part, mut most) = (0.0, 1.0);
            for _ in 0..STEADY_HALVINGS {
                let middle = (part + most) / 2.0;
                match middle * tokens < ratio * generating(middle) {
                    true => part = middle,
                    false => most = middle,
                }
            }
            let seconds = part * mixed(all - together, tokens) + (1.0 - part) * alone;
            seconds / (ratio * generating(part))
        };
        let costs: Vec<f64> = self.sizes.iter().map(|&rows| cost(rows)).collect();
        let most = (1.0 + STEADY_TOLERANCE) * costs.iter().copied().fold(f64::INFINITY, f64::min);
        let last = costs.iter().rposition(|&cost| cost <= most);
        last.map_or(self.most, |at| self.sizes[at])
    }

    /// Most prompt tokens of a step that takes at most `seconds`, between the known sizes too: in whole tiles, or less than one.
    fn tokens_within(&self, decoding: usize, seconds: f64) -> usize {
        let rows = decoding + self.costs.mixed_tokens(decoding, seconds);
        let rows = match rows > TILE {
            true => rows / TILE * TILE,
            false => rows,
        };
        rows.saturating_sub(decoding) / self.chunk * self.chunk
    }

    /// The prompt tokens that fill steps of the known sizes, in whole chunks, the fewest first.
    fn choices(&self, decoding: usize) -> Vec<Choice> {
        // Prompts never make a step shorter, whatever was measured.
        let least = match decoding {
            0 => 0.0,
            rows => self.costs.decode_seconds(rows),
        };
        let rooms = self.sizes.iter().map(|rows| rows.saturating_sub(decoding));
        let choices = rooms.filter(|&room| room >= self.chunk).map(|room| Choice {
            tokens: room / self.chunk * self.chunk,
            seconds: self.costs.mixed_seconds(decoding, room).max(least),
        });
        choices.collect()
    }

    /// How long the next step may encode: a fifth of the time that it takes anyway, and more while others wait. `None` where nobody
    /// generates, or where it is not known how long images take: then they are encoded at once.
    pub fn encode_time(&self, load: &Load) -> Option<EncodeTime> {
        let cost = self.costs.encode()?;
        let Load {
            decoding,
            context,
            prompts,
            ..
        } = *load;
        if decoding == 0 {
            return None;
        }
        let alone = self.costs.decode_seconds(decoding) + self.costs.context_seconds() * context as f64;
        let others = prompts.saturating_sub(1) as f64 / decoding as f64;
        let seconds = (ENCODE_STRETCH + ENCODE_STRETCH_BY_BACKLOG * others.sqrt()) * alone;
        // Half of what is left, the other half is for prompts.
        let target = self.target.map(|target| (target - alone).max(0.0) / 2.0);
        Some(EncodeTime {
            seconds: target.map_or(seconds, |target| seconds.min(target)),
            first: target.map_or(seconds, |_| 0.0),
            cost,
        })
    }

    /// Fewest and most prompt tokens that cost hardly more than they must.
    fn cheap(&self, choices: &[Choice], decoding: usize, prompts: usize) -> (usize, usize) {
        let generating = decoding as f64 / (decoding + prompts) as f64;
        let fixed = self.costs.fixed_seconds(decoding.max(1));
        let shared = fixed * (1.0 - generating.powf(SHARE_EXPONENT));
        let alone = match decoding {
            0 => fixed,
            rows => self.costs.decode_seconds(rows),
        };
        let cost = |choice: &Choice| (choice.seconds - alone + shared) / choice.tokens as f64;
        let cheapest = choices.iter().map(cost).fold(f64::INFINITY, f64::min);
        let mut cheap = choices
            .iter()
            .filter(|&choice| cost(choice) <= cheapest * (1.0 + TOLERANCE));
        let Some(fewest) = cheap.next() else {
            return (self.chunk, self.chunk);
        };
        (fewest.tokens, cheap.next_back().unwrap_or(fewest).tokens)
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_core::StepCost;

    use super::*;

    const MOST: usize = 8192;

    /// Reads weights in 4 ms, then computes 20 us a row, and needs 0.3 ms more for prompts.
    fn budget(target: Option<u64>) -> PromptBudget {
        let cost = |rows: usize, seconds: f64| StepCost { rows, seconds };
        let decode = [1, 64, 128, 256, 512].map(|rows| cost(rows, f64::max(4e-3, 20e-6 * rows as f64)));
        let mixed =
            [32, 128, 200, 512, 2048].map(|rows| cost(rows, 0.3e-3 + f64::max(4e-3, 20e-6 * rows as f64)));
        let costs = StepCosts::new(decode.into(), mixed.into(), 0.0).unwrap();
        PromptBudget::new(costs, MOST, target.map(Duration::from_millis))
    }

    fn load(decoding: usize, prompts: usize) -> Load {
        Load {
            decoding,
            prompts,
            context: 100 * decoding,
            next_prompt: 512,
            encoding: false,
            steady: None,
        }
    }

    #[test]
    fn a_single_prompt_rides_where_rows_are_free() {
        let tokens = budget(None).prompt_tokens(&load(64, 1));
        // Up to 200 rows a step takes no longer, and twice as long is all that readers are asked for.
        assert_eq!(tokens, 136);
    }

    #[test]
    fn the_longer_the_backlog_the_larger_the_step() {
        let budget = budget(None);
        let tokens: Vec<usize> = [1, 8, 64, 512, 4096]
            .map(|prompts| budget.prompt_tokens(&load(64, prompts)))
            .into();
        assert!(tokens.is_sorted() && tokens[4] > 4 * tokens[0], "{tokens:?}");
        assert_eq!(budget.prompt_tokens(&load(0, 100)), 2048, "nobody reads");
        assert_eq!(budget.prompt_tokens(&load(100, 0)), MOST - 100, "nobody waits");
    }

    #[test]
    fn sizes_go_on_beyond_what_was_measured() {
        assert_eq!(
            budget(None).sizes,
            [32, 128, 200, 512, 2048, 3072, 4096, 6144, 8192]
        );
        let cost = |rows: usize| StepCost {
            rows,
            seconds: 1e-3 * rows as f64,
        };
        let costs = StepCosts::new([1, 32].map(cost).into(), [32, 128].map(cost).into(), 0.0).unwrap();
        // 192 rows would be a tile and a half.
        assert_eq!(
            PromptBudget::new(costs, 600, None).sizes,
            [32, 128, 256, 384, 512, 600]
        );
    }

    #[test]
    fn a_burst_is_computed_in_large_steps_that_shrink_with_the_backlog() {
        let budget = budget(None);
        let rows = [20, 100, 300, 400, 450, 500, 550, 590].map(|decoding| {
            let load = load(decoding, 600 - decoding);
            decoding + budget.prompt_tokens(&load)
        });
        assert_eq!(rows, [8192, 6144, 6144, 4096, 4096, 3072, 3072, 2048]);
    }

    #[test]
    fn bunches_of_requests_that_follow_others_are_spread() {
        let budget = budget(None);
        let tokens = |prompts, outputs| {
            let steady = Some(Ended {
                requests: 1,
                prompts,
                outputs,
            });
            budget.prompt_tokens(&Load {
                steady,
                ..load(64, 64)
            })
        };
        let on_top = budget.prompt_tokens(&load(64, 64));
        assert_eq!(on_top, 2048 - 64);
        // 128 requests, each with 4 prompt tokens for one of output: 512 rows.
        assert_eq!(tokens(512, 128), 512 - 64);
        // Nearly all of the work is prompts, and their tokens are the cheapest in large steps.
        assert_eq!(tokens(512, 2), on_top);
    }

    #[test]
    fn readers_wait_a_fifth_longer_for_an_image_and_more_for_a_backlog() {
        let cost = EncodeCost {
            patch_seconds: 10e-6,
            pair_seconds: 0.0,
        };
        let of = |target| {
            let budget = budget(target);
            let costs = budget.costs.clone().with_encode(Some(cost));
            PromptBudget { costs, ..budget }
        };
        let share = |budget: &PromptBudget, decoding, prompts| {
            let time = budget.encode_time(&load(decoding, prompts));
            time.map(|time| time.share(4000, true))
        };
        // 4 ms a step, 40 ms an image.
        let budget_of_images = of(None);
        assert_eq!(share(&budget(None), 64, 1), None, "a model without images");
        assert_eq!(share(&budget_of_images, 0, 1), None, "nobody reads");
        let alone = share(&budget_of_images, 64, 1).unwrap();
        assert!((alone - 0.02).abs() < 1e-6, "{alone}");
        let shares: Vec<f64> = [2, 8, 64]
            .map(|prompts| share(&budget_of_images, 64, prompts).unwrap())
            .into();
        assert!(
            shares.is_sorted() && shares[0] > alone && shares[2] > 0.5,
            "{shares:?}"
        );
        // Half of the 1 ms that is left, or nothing.
        assert!((share(&of(Some(5)), 64, 64).unwrap() - 1.0 / 80.0).abs() < 1e-6);
        assert_eq!(share(&of(Some(4)), 64, 64), Some(1.0 / 256.0));
        // Prompts get what an image leaves of a target. It begins with the least part, as prompts may take all of that step.
        let (bounded, waiting) = (of(Some(8)), load(64, 64));
        let time = bounded.encode_time(&waiting).unwrap();
        assert_eq!(time.share(4000, false), 1.0 / 256.0);
        let beside = Load {
            encoding: true,
            ..waiting
        };
        let [all, rest] = [waiting, beside].map(|load| bounded.prompt_tokens(&load));
        let seconds = |tokens: usize| bounded.costs.mixed_seconds(64, tokens);
        assert!(seconds(all) <= 8e-3 && rest < all, "{rest} of {all} tokens");
        assert!(
            seconds(rest) + time.share(4000, true) * cost.seconds(4000) <= 8e-3 + 1e-6,
            "{rest} tokens beside {time:?}"
        );
    }

    /// One row more would cost a tile more.
    #[test]
    fn steps_fill_a_known_size() {
        let budget = budget(None);
        let in_chunks = budget.clone().in_chunks_of(64);
        for decoding in (1..600).chain(MOST - 200..MOST) {
            for (prompts, next_prompt) in [(1, 512), (1, 100_000), (8, 512), (64, 512), (1000, 512)] {
                let load = Load {
                    next_prompt,
                    ..load(decoding, prompts)
                };
                let rows = decoding + budget.prompt_tokens(&load);
                assert!(budget.sizes.contains(&rows), "{rows} rows of {load:?}");
                let tokens = in_chunks.prompt_tokens(&load);
                // No room for the least that a prompt gets.
                if decoding + 512 > MOST {
                    continue;
                }
                let rest = budget
                    .sizes
                    .iter()
                    .filter_map(|rows| rows.checked_sub(decoding + tokens));
                assert!(
                    tokens.is_multiple_of(64) && rest.min().is_some_and(|rest| rest < 64),
                    "{tokens} tokens in chunks of {load:?}"
                );
            }
        }
    }

    #[test]
    fn prompts_in_chunks_get_whole_ones() {
        let budget_of = |target| budget(target).in_chunks_of(64);
        assert_eq!(budget_of(None).prompt_tokens(&load(64, 1)), 128);
        assert_eq!(budget_of(None).prompt_tokens(&load(64, 64)), 1984);
        // 384 rows.
        assert_eq!(budget_of(Some(8)).prompt_tokens(&load(64, 64)), 320);
        let tight = budget(Some(1)).in_chunks_of(64);
        assert_eq!(tight.prompt_tokens(&load(64, 1)), 64, "at least one");
        let long = Load {
            next_prompt: 20_000,
            ..load(64, 1)
        };
        assert_eq!(tight.prompt_tokens(&long), 128, "in 256 steps");
    }

    /// As where decode steps were measured to take longer than any with prompts.
    #[test]
    fn no_measurement_makes_prompts_crawl() {
        let cost = |rows: usize, seconds: f64| StepCost { rows, seconds };
        let decode = [1, 32].map(|rows| cost(rows, 1e-3 * rows as f64));
        let mixed = [32, 128, 512].map(|rows| cost(rows, 4e-3 + 20e-6 * rows as f64));
        let costs = StepCosts::new(decode.into(), mixed.into(), 0.0).unwrap();
        let tokens = PromptBudget::new(costs, MOST, None).prompt_tokens(&load(32, 1));
        assert!(tokens >= 480, "{tokens}");
    }

    /// There are no tiles on a CPU, and limits of 32 requests and 512 tokens.
    #[test]
    fn a_target_between_two_sizes_is_used() {
        let cost = |rows: usize| StepCost {
            rows,
            seconds: 1e-3 * rows as f64,
        };
        let costs = StepCosts::new(
            [1, 32].map(cost).into(),
            [32, 128, 256, 384, 512].map(cost).into(),
            0.0,
        );
        let budget = PromptBudget::new(costs.unwrap(), 512, Some(Duration::from_millis(60)));
        for decoding in [1, 2, 4, 20, 31, 32] {
            let tokens = budget.prompt_tokens(&load(decoding, 8));
            assert!(
                decoding + tokens <= 60 && decoding + tokens >= 58,
                "{tokens} beside {decoding}"
            );
        }
    }

    #[test]
    fn a_target_bounds_the_step_but_no_prompt_starves() {
        let budget = budget(Some(6));
        for prompts in [1, 100, 10_000] {
            let tokens = budget.prompt_tokens(&load(64, prompts));
            assert!(tokens <= (6.0e-3 / 20e-6) as usize - 64, "{tokens}");
        }
        let long = Load {
            next_prompt: 100_000,
            ..load(400, 1)
        };
        assert_eq!(budget.prompt_tokens(&long), 391, "in 256 steps");
        let full = load(MOST, 1);
        assert_eq!(budget.prompt_tokens(&full), 0);
    }
}
