/// Measured time of steps with this many rows. A row is a token that a step computes, of a prompt or of an output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCost {
    /// Rows of the step.
    pub rows: usize,
    /// Its time.
    pub seconds: f64,
}

/// Most requests that generate in the steps with prompts that are measured.
pub const OUTPUTS_BESIDE_PROMPTS: usize = 16;

/// Rows of the steps without prompts that are measured.
pub const MEASURED_DECODE_ROWS: [usize; 7] = [1, 64, 128, 256, 384, 512, 1024];

/// Rows of the steps with prompts that are measured; [`larger_rows`] follow.
pub const MEASURED_MIXED_ROWS: [usize; 8] = [32, 128, 256, 384, 512, 768, 1024, 2048];

/// A row that costs less than this part of what it costs in the cheapest smaller step is cheaper.
const CHEAPER: f64 = 0.98;

/// Rows of the next larger step with prompts to measure, a power of two or `most`: if all of [`MEASURED_MIXED_ROWS`] were, and a row was
/// cheaper in the largest than in all smaller ones. The weights of many experts are read for each step, so that their rows get cheaper
/// up to thousands. `measured` is in ascending order.
pub fn larger_rows(measured: &[StepCost], most: usize) -> Option<usize> {
    let of_row = |step: &StepCost| step.seconds / step.rows as f64;
    let (largest, smaller) = measured.split_last()?;
    let before = smaller.iter().map(of_row).min_by(f64::total_cmp)?;
    let is_last = largest.rows >= MEASURED_MIXED_ROWS[MEASURED_MIXED_ROWS.len() - 1];
    let rows = (largest.rows + 1).next_power_of_two().min(most);
    (is_last && of_row(largest) < CHEAPER * before && rows > largest.rows).then_some(rows)
}

/// How long steps take, from a few measured ones. Time never falls with the number of rows, and is linear between measured steps.
/// Beyond the last decode step it goes on as before it. Beyond the last step with prompts a row costs what it costs on average in the
/// best one: what the last two differ by is mostly chance, as some sizes suit the products more than others, and a device that computes
/// all the time slows down, which a few steps do not show.
#[derive(Clone, Debug, PartialEq)]
pub struct StepCosts {
    /// Only outputs: one row of each request.
    decode: Vec<StepCost>,
    /// Of each of these, what it takes less what its rows add.
    fixed: Vec<StepCost>,
    /// Prompts too.
    mixed: Vec<StepCost>,
    /// Added for each token of context that the outputs look back at.
    context_seconds: f64,
    /// Added for each row of output beside prompts beyond the first [`OUTPUTS_BESIDE_PROMPTS`].
    output_seconds: f64,
    /// Of the step with prompts in which a row costs the least on average.
    row_seconds: f64,
    encode: Option<EncodeCost>,
}

/// How long images take to encode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncodeCost {
    /// For each patch.
    pub patch_seconds: f64,
    /// For each pair of patches: all see each other.
    pub pair_seconds: f64,
}

impl EncodeCost {
    /// Seconds for an image of so many patches.
    pub fn seconds(&self, patches: usize) -> f64 {
        let patches = patches as f64;
        patches * (self.patch_seconds + patches * self.pair_seconds)
    }
}

impl StepCosts {
    /// From steps in which every request generated a token (`decode`) and steps that computed prompts too (`mixed`), all with
    /// short contexts, and the time per token of context. `None` if there are too few to tell what a row costs, or not all are
    /// times.
    pub fn new(decode: Vec<StepCost>, mixed: Vec<StepCost>, context_seconds: f64) -> Option<Self> {
        let (decode, mixed) = (ladder(decode)?, ladder(mixed)?);
        let known = context_seconds.is_finite() && context_seconds >= 0.0;
        (known && mixed.len() > 1).then(|| Self {
            output_seconds: Self::output_seconds(&decode, &mixed),
            row_seconds: (mixed.iter().map(|step| step.seconds / step.rows as f64))
                .fold(f64::INFINITY, f64::min),
            fixed: fixed(&decode),
            decode,
            mixed,
            context_seconds,
            encode: None,
        })
    }

    /// The same of a model that encodes images.
    pub fn with_encode(self, encode: Option<EncodeCost>) -> Self {
        Self { encode, ..self }
    }

    /// What an image takes; `None` without an encoder, or where nothing is known of it.
    pub fn encode(&self) -> Option<EncodeCost> {
        self.encode
    }

    /// Steps without prompts, by rows.
    pub fn decode(&self) -> &[StepCost] {
        &self.decode
    }

    /// Steps with prompts, by rows.
    pub fn mixed(&self) -> &[StepCost] {
        &self.mixed
    }

    /// Seconds that a row of output adds for each token of its context.
    pub fn context_seconds(&self) -> f64 {
        self.context_seconds
    }

    /// Seconds of a step that generates a token for each of `rows` requests with short contexts.
    pub fn decode_seconds(&self, rows: usize) -> f64 {
        seconds(&self.decode, None, rows)
    }

    /// Seconds of such a step less what its rows add: those of a step for one request, or more with many experts, of which one request
    /// hits a few and many requests hit all. Never falls with the number of rows.
    pub fn fixed_seconds(&self, rows: usize) -> f64 {
        seconds(&self.fixed, Some(0.0), rows)
    }

    /// Seconds of a step that generates a token for each of `decoding` requests with short contexts, and computes `prompts` tokens
    /// of prompts.
    pub fn mixed_seconds(&self, decoding: usize, prompts: usize) -> f64 {
        self.mixed_by_rows(decoding + prompts) + self.excess(decoding)
    }

    /// Most prompt tokens of a step that generates for `decoding` requests too and takes at most `seconds`; 0 where none does.
    pub fn mixed_tokens(&self, decoding: usize, seconds: f64) -> usize {
        let rows = self.mixed_rows(seconds - self.excess(decoding));
        rows.saturating_sub(decoding)
    }

    /// Seconds that so many rows of outputs add to those of a step with prompts, beyond what as many rows of prompts take.
    fn excess(&self, decoding: usize) -> f64 {
        let more = decoding.saturating_sub(OUTPUTS_BESIDE_PROMPTS);
        self.output_seconds * more as f64
    }

    /// Seconds that a row of output takes longer than one of a prompt: it is sampled from, and where a model has states it reads and
    /// writes one of its own. From the largest size that was measured without prompts and with them; where there is none, from the
    /// largest without prompts that lies between sizes with them.
    fn output_seconds(decode: &[StepCost], mixed: &[StepCost]) -> f64 {
        let [Some(least), Some(most)] = [mixed.first(), mixed.last()] else {
            return 0.0;
        };
        let in_range = |step: &&StepCost| {
            step.rows > OUTPUTS_BESIDE_PROMPTS && (least.rows..=most.rows).contains(&step.rows)
        };
        let is_in_both = |step: &&StepCost| mixed.iter().any(|with| with.rows == step.rows);
        let candidates = || decode.iter().rev().filter(in_range);
        let outputs = candidates().find(is_in_both).or_else(|| candidates().next());
        outputs.map_or(0.0, |outputs| {
            let longer = outputs.seconds - seconds(mixed, None, outputs.rows);
            (longer / (outputs.rows - OUTPUTS_BESIDE_PROMPTS) as f64).max(0.0)
        })
    }

    /// Seconds of a step of `rows` rows, nearly all of them of prompts.
    fn mixed_by_rows(&self, rows: usize) -> f64 {
        seconds(&self.mixed, Some(self.row_seconds), rows)
    }

    /// Most rows of a step of prompts that takes at most `seconds`; 0 where none does.
    fn mixed_rows(&self, seconds: f64) -> usize {
        let after = self.mixed.partition_point(|cost| cost.seconds <= seconds);
        let Some(before) = after.checked_sub(1) else {
            return 0;
        };
        let (from, slope) = (
            self.mixed[before],
            slope(&self.mixed, Some(self.row_seconds), before),
        );
        // Of no time at all is only what was measured.
        let more = match slope > 0.0 {
            true => (seconds - from.seconds) / slope,
            false => 0.0,
        };
        from.rows + more as usize
    }
}

/// In order of rows, with times that do not fall; a time below that of fewer rows is noise.
fn ladder(mut costs: Vec<StepCost>) -> Option<Vec<StepCost>> {
    let is_time = |cost: &StepCost| cost.rows > 0 && cost.seconds.is_finite() && cost.seconds > 0.0;
    if costs.is_empty() || !costs.iter().all(is_time) {
        return None;
    }
    costs.sort_by_key(|cost| cost.rows);
    costs.dedup_by(|next, cost| {
        let same = next.rows == cost.rows;
        if same {
            cost.seconds = cost.seconds.min(next.seconds);
        }
        same
    });
    let mut longest = 0.0_f64;
    for cost in &mut costs {
        longest = longest.max(cost.seconds);
        cost.seconds = longest;
    }
    Some(costs)
}

/// Of steps without prompts, what each takes less what its rows add: at least what the smallest takes, and never less than of fewer rows.
fn fixed(decode: &[StepCost]) -> Vec<StepCost> {
    let mut most = seconds(decode, None, 1);
    let steps = decode.iter().enumerate();
    let fixed = steps.map(|(at, step)| {
        most = most.max(step.seconds - slope(decode, None, at) * step.rows as f64);
        StepCost {
            seconds: most,
            ..*step
        }
    });
    fixed.collect()
}

/// Seconds per row behind the measured step `at`; behind the last one `beyond`, or as before it.
fn slope(ladder: &[StepCost], beyond: Option<f64>, at: usize) -> f64 {
    let between = |from: &StepCost, to: &StepCost| (to.seconds - from.seconds) / (to.rows - from.rows) as f64;
    match (ladder.get(at + 1), beyond, ladder) {
        (Some(next), ..) => between(&ladder[at], next),
        (None, Some(beyond), _) => beyond,
        (None, None, [.., from, to]) => between(from, to),
        (None, None, _) => 0.0,
    }
}

fn seconds(ladder: &[StepCost], beyond: Option<f64>, rows: usize) -> f64 {
    let after = ladder.partition_point(|cost| cost.rows <= rows);
    let before = after.saturating_sub(1);
    let from = ladder[before];
    from.seconds + slope(ladder, beyond, before) * rows.saturating_sub(from.rows) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(mixed: &[(usize, f64)]) -> Option<StepCosts> {
        let cost = |&(rows, seconds): &(usize, f64)| StepCost { rows, seconds };
        let mixed = mixed.iter().map(cost).collect();
        StepCosts::new(vec![cost(&(1, 1.0)), cost(&(101, 2.0))], mixed, 0.0)
    }

    #[test]
    fn times_between_and_beyond_the_measured_steps_are_linear() {
        let costs = costs(&[(100, 2.0), (200, 4.0), (400, 10.0)]).unwrap();
        for (rows, seconds) in [
            (1, 2.0),
            (100, 2.0),
            (150, 3.0),
            (300, 7.0),
            (400, 10.0),
            (500, 12.0),
        ] {
            assert!((costs.mixed_seconds(0, rows) - seconds).abs() < 1e-9, "{rows}");
        }
        for (seconds, rows) in [(1.9, 0), (2.0, 100), (3.0, 150), (10.0, 400), (12.0, 500)] {
            assert_eq!(costs.mixed_tokens(0, seconds), rows, "{seconds}");
        }
        assert!((costs.decode_seconds(51) - 1.5).abs() < 1e-9);
        assert!((costs.decode_seconds(201) - 3.0).abs() < 1e-9);
    }

    /// As of Qwen3-30B-A3B on an H200, and of a model without experts.
    #[test]
    fn the_weights_of_experts_are_a_fixed_time_of_many_requests() {
        let cost = |&(rows, seconds): &(usize, f64)| StepCost { rows, seconds };
        let mixed: Vec<_> = [(128, 15.66), (512, 18.3)].iter().map(cost).collect();
        let decode = [(1, 3.87), (64, 14.69), (128, 17.36), (256, 18.53), (512, 20.54)];
        let costs = StepCosts::new(decode.iter().map(cost).collect(), mixed, 0.0).unwrap();
        assert!((costs.fixed_seconds(1) - 3.87).abs() < 1e-9);
        let fixed: Vec<_> = (1..600).map(|rows| costs.fixed_seconds(rows)).collect();
        assert!((16.2..16.6).contains(&fixed[299]), "{}", fixed[299]);
        let mut changes = fixed.windows(2).map(|two| two[1] - two[0]);
        assert!(changes.all(|change| (0.0..0.2).contains(&change)), "no jumps");
        let dense = costs_of_rows();
        for rows in [1, 64, 128, 500, 800] {
            let fixed = dense.fixed_seconds(rows);
            assert!(
                (fixed - dense.decode_seconds(1)).abs() < 1e-9,
                "{fixed} of {rows}"
            );
        }
    }

    /// As measured on an H200, where the last slope alone would make steps of 8192 rows look cheaper than any, and where another size
    /// than the last happened to suit the products best.
    #[test]
    fn beyond_the_last_step_a_row_costs_what_it_costs_in_the_best() {
        for (last, expected) in [
            ((2048, 43.07), 43.07 + 6144.0 * 43.07 / 2048.0),
            ((1536, 37.6), 37.6 + 6656.0 * 22.75 / 1024.0),
        ] {
            let costs = costs(&[(512, 12.34), (1024, 22.75), last]).unwrap();
            let seconds = costs.mixed_seconds(0, 8192);
            assert!((seconds - expected).abs() < 1e-9, "{seconds}, not {expected}");
        }
    }

    #[test]
    fn a_step_of_more_rows_takes_no_less_time() {
        let costs = costs(&[(400, 4.0), (100, 3.0), (200, 1.0), (100, 2.0)]).unwrap();
        let times: Vec<f64> = (1..800).map(|rows| costs.mixed_seconds(0, rows)).collect();
        assert!(times.is_sorted());
        assert_eq!(
            costs.mixed()[1],
            StepCost {
                rows: 200,
                seconds: 2.0
            }
        );
    }

    /// As of Qwen3.5-9B on an H200: 256 requests that generate take longer alone than 288 rows nearly all of which are of prompts.
    #[test]
    fn outputs_that_take_longer_than_prompts_count_as_what_they_are() {
        let cost = |&(rows, seconds): &(usize, f64)| StepCost { rows, seconds };
        let decode = [(1, 5.05), (64, 7.14), (128, 9.48), (256, 14.77), (512, 28.44)];
        let mixed = [(32, 6.56), (128, 7.18), (256, 8.8), (512, 13.62), (1024, 23.48)];
        let [decode, mixed] = [&decode, &mixed].map(|steps| steps.iter().map(cost).collect());
        let costs = StepCosts::new(decode, mixed, 0.0).unwrap();
        for decoding in [64, 128, 256, 512] {
            let alone = costs.decode_seconds(decoding);
            for prompts in [1, 32, 512] {
                let seconds = costs.mixed_seconds(decoding, prompts);
                assert!(seconds > alone, "{decoding} beside {prompts}: {seconds}");
                let tokens = costs.mixed_tokens(decoding, seconds + 1e-9);
                assert_eq!(
                    costs.mixed_seconds(decoding, tokens),
                    seconds,
                    "{tokens} of {prompts}"
                );
            }
        }
        let expected = (28.44 - 13.62) / (512.0 - 16.0);
        assert!((costs.output_seconds - expected).abs() < 1e-9, "{costs:?}");
        // As with at most 110 requests at once: no size is in both.
        let few = StepCosts::new(
            [(1, 5.0), (64, 7.0), (110, 9.0)].map(|step| cost(&step)).into(),
            [(32, 6.5), (128, 7.1)].map(|step| cost(&step)).into(),
            0.0,
        );
        let expected = (9.0 - (6.5 + 0.6 * 78.0 / 96.0)) / 94.0;
        assert!((few.unwrap().output_seconds - expected).abs() < 1e-9);
        let dense = costs_of_rows();
        let more = dense.mixed_seconds(256, 256) - dense.mixed_seconds(0, 512);
        assert!(more.abs() < 1e-9, "{more}");
    }

    /// Of a model whose rows all take the same.
    fn costs_of_rows() -> StepCosts {
        let cost = |rows: usize, more: f64| StepCost {
            rows,
            seconds: 4.0 + 0.02 * rows as f64 + more,
        };
        let decode = [1, 128, 512].map(|rows| cost(rows, 0.0)).into();
        let mixed = [32, 256, 1024].map(|rows| cost(rows, 0.3)).into();
        StepCosts::new(decode, mixed, 0.0).unwrap()
    }

    /// As of Qwen3-30B-A3B and of Llama-3.1-8B on an H200.
    #[test]
    fn larger_steps_are_measured_while_a_row_gets_cheaper() {
        let larger = |steps: &[(usize, f64)]| {
            let cost = |&(rows, seconds): &(usize, f64)| StepCost { rows, seconds };
            larger_rows(&steps.iter().map(cost).collect::<Vec<_>>(), 6000)
        };
        let experts = [(1024, 25.3), (2048, 36.6), (4096, 61.8), (6000, 85.0)];
        assert_eq!(larger(&experts[..0]), None);
        assert_eq!(larger(&experts[1..2]), None, "only one");
        assert_eq!(larger(&experts[..1]), None, "2048 rows were not measured");
        assert_eq!(larger(&experts[..2]), Some(4096));
        assert_eq!(larger(&experts[..3]), Some(6000), "as large as there may be");
        assert_eq!(larger(&experts), None, "no larger one");
        assert_eq!(larger(&[(2048, 42.8), (4096, 84.5)]), None, "hardly cheaper");
        assert_eq!(larger(&[(1024, 22.75), (2048, 46.3)]), None);
    }

    #[test]
    fn what_is_no_measurement_is_refused() {
        assert_eq!(costs(&[]), None);
        assert_eq!(costs(&[(100, 1.0)]), None);
        for wrong in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            assert_eq!(costs(&[(100, 1.0), (200, wrong)]), None);
        }
        assert_eq!(costs(&[(0, 1.0), (200, 2.0)]), None);
    }
}
