use plimsoll_core::{Run, Sampled, StepOutput, StepPlan};

/// How `output` fails to answer `plan`, if it does.
pub(crate) fn defect(plan: &StepPlan, output: &StepOutput) -> Option<String> {
    let (runs, samples, not_finite) = (plan.runs.len(), output.samples.len(), &output.not_finite);
    if runs != samples {
        return Some(format!("{samples} results for {runs} runs"));
    }
    if !not_finite.is_sorted_by(|a, b| a < b) || not_finite.last().is_some_and(|&last| last >= runs) {
        return Some(format!("runs {not_finite:?} of {runs} are not finite"));
    }
    // Of a run that is not finite there is nothing to be had.
    let runs = || (plan.runs.iter().enumerate()).map(|(index, run)| (run, output.is_finite(index)));
    let pooled = output.pooled.iter().map(Option::is_some);
    let mut pooled = runs().zip(pooled.chain(std::iter::repeat(false)));
    let is_wrong =
        |((run, finite), pooled): &((&Run, bool), bool)| (run.pool.is_some() && *finite) != *pooled;
    if let Some(((run, _), _)) = pooled.find(is_wrong) {
        return Some(format!("a vector too few or too many for {}", run.request));
    }
    let mut pairs = runs().zip(&output.samples);
    let is_wrong = |((run, finite), sampled): &((&Run, bool), &Option<Sampled>)| {
        (run.sample.is_some() && *finite) != sampled.is_some()
    };
    if let Some(((run, _), sampled)) = pairs.find(is_wrong) {
        let what = match sampled {
            Some(_) => "a token that was not asked for",
            None => "no token",
        };
        return Some(format!("{what} for {}", run.request));
    }
    let asked = runs().filter_map(|(run, finite)| Some((run.score.as_ref()?, finite)));
    let same = asked
        .map(|(score, finite)| if finite { score.targets.len() } else { 0 })
        .eq(output.scores.iter().map(Vec::len));
    (!same).then(|| "log-probabilities of other prompt tokens than were asked for".to_owned())
}
