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

/// How long steps take, from a few measured ones. Between them time is linear, beyond the last one too, and it never falls with
/// the number of rows. Beyond the last step with prompts a row costs what it costs on average in the best one: what two steps differ by
/// is mostly chance, as sizes suit the products more or less, and a device that computes all the time slows down, which a few steps do
/// not show.
#[derive(Clone, Debug, PartialEq)]
pub struct StepCosts {
    /// Only outputs: one row of each request.
    decode: Vec<StepCost>,
    /// Prompts too.
    mixed: Vec<StepCost>,
    /// Added for each token of context that the outputs look back at.
    context_seconds: f64,
    /// Added for each row of output beside prompts beyond the first [`OUTPUTS_BESIDE_PROMPTS`].
    output_seconds: f64,
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

    /// Seconds of a step that generates a token for each of `decoding` requests with short contexts, and computes `prompts` tokens
    /// of prompts.
    pub fn mixed_seconds(&self, decoding: usize, prompts: usize) -> f64 {
        self.mixed_by_rows(decoding + prompts) + self.excess(decoding)
    }

    /// Seconds that so many rows of outputs add to those of a step with prompts, beyond what as many rows of prompts take.
    fn excess(&self, decoding: usize) -> f64 {
        let more = decoding.saturating_sub(OUTPUTS_BESIDE_PROMPTS);
        self.output_seconds * more as f64
    }

    /// Seconds that a row of output takes longer than one of a prompt: it is sampled from, and where a model has states it reads and
    /// writes one of its own. From the largest size that was measured without prompts and with them.
    fn output_seconds(decode: &[StepCost], mixed: &[StepCost]) -> f64 {
        let both = decode
            .iter()
            .rev()
            .filter(|step| step.rows > OUTPUTS_BESIDE_PROMPTS)
            .find_map(|outputs| {
                let prompts = mixed.iter().find(|step| step.rows == outputs.rows)?;
                Some((outputs, prompts))
            });
        both.map_or(0.0, |(outputs, prompts)| {
            let more = outputs.rows - OUTPUTS_BESIDE_PROMPTS;
            ((outputs.seconds - prompts.seconds) / more as f64).max(0.0)
        })
    }

    /// Seconds of a step of `rows` rows, nearly all of them of prompts.
    fn mixed_by_rows(&self, rows: usize) -> f64 {
        seconds(&self.mixed, Some(self.least_average()), rows)
    }

    /// Seconds per row of the step with prompts in which a row costs the least.
    fn least_average(&self) -> f64 {
        let averages = self.mixed.iter().map(|step| step.seconds / step.rows as f64);
        averages.fold(f64::INFINITY, f64::min)
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
        assert!((costs.decode_seconds(51) - 1.5).abs() < 1e-9);
        assert!((costs.decode_seconds(201) - 3.0).abs() < 1e-9);
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
            }
        }
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
