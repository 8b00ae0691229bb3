use plimsoll_core::{StepOutput, StepPlan};

/// How `output` fails to answer `plan`, if it does.
pub(crate) fn defect(plan: &StepPlan, output: &StepOutput) -> Option<String> {
    let (runs, samples) = (plan.runs.len(), output.samples.len());
    if runs != samples {
        return Some(format!("{samples} results for {runs} runs"));
    }
    let pooled = output.pooled.iter().map(Option::is_some);
    let mut pooled = plan.runs.iter().zip(pooled.chain(std::iter::repeat(false)));
    if let Some((run, _)) = pooled.find(|(run, pooled)| run.pool.is_some() != *pooled) {
        return Some(format!("a vector too few or too many for {}", run.request));
    }
    let mut pairs = plan.runs.iter().zip(&output.samples);
    if let Some((run, sampled)) = pairs.find(|(run, sampled)| run.sample.is_some() != sampled.is_some()) {
        let what = match sampled {
            Some(_) => "a token that was not asked for",
            None => "no token",
        };
        return Some(format!("{what} for {}", run.request));
    }
    let asked = plan.runs.iter().filter_map(|run| run.score.as_ref());
    let same = asked
        .map(|score| score.targets.len())
        .eq(output.scores.iter().map(Vec::len));
    (!same).then(|| "log-probabilities of other prompt tokens than were asked for".to_owned())
}
