//! Plans that no scheduler makes.

use std::sync::Arc;

use plimsoll_core::{PageId, Run, RunInput, SampleSpec, SamplingOptions, SamplingParams, ScoreSpec};

use super::{Oracle, blocks, greedy_spec, plan, run};

/// `runner` has 8 blocks of 8 tokens, a vocabulary of 160, and [`super::LIMITS`].
pub fn refuses_malformed_plans(runner: &mut impl Oracle) {
    let good = || run(1, 0, &[5; 20], &blocks(0..3));
    let penalised = SamplingOptions {
        repetition_penalty: Some(1.5),
        ..Default::default()
    };
    let penalised = Arc::new(SamplingParams::new(&penalised, 160).unwrap());
    let mut short_history = good();
    short_history.sample = Some(SampleSpec {
        params: penalised,
        prompt_len: 1,
        ..greedy_spec(0)
    });
    let mut unknown_history = good();
    unknown_history.sample = Some(SampleSpec {
        history: vec![160],
        ..greedy_spec(0)
    });
    let scored = |first, count, sample: bool, token| {
        let mut run = good();
        run.score = Some(ScoreSpec {
            first,
            targets: vec![token; count],
            top: 1,
        });
        run.sample = sample.then(|| greedy_spec(0));
        vec![run]
    };
    let cases = [
        (scored(0, 20, true, 5), "by 19 rows"),
        (scored(usize::MAX, 1, false, 5), "by 20 rows"),
        (scored(3, 0, false, 5), "0 tokens from row 3"),
        (scored(0, 1, false, 160), "token 160"),
        (vec![run(1, 0, &[], &blocks(0..3))], "without tokens"),
        (vec![run(1, 0, &[160], &blocks(0..3))], "token 160"),
        (vec![run(1, 5, &[5; 20], &blocks(0..3))], "4 are needed"),
        (vec![run(1, 0, &[5], &blocks(8..9))], "page 8 of 8"),
        (vec![run(1, 120, &[5; 9], &blocks(0..3))], "longest context"),
        (
            vec![run(1, usize::MAX, &[5; 9], &blocks(0..3))],
            "longest context",
        ),
        (
            vec![run(1, 0, &[5; 20], &[PageId(1), PageId(1), PageId(2)])],
            "twice",
        ),
        (vec![good(), good()], "twice"),
        (
            vec![Run {
                input: RunInput::LastSampled,
                ..good()
            }],
            "nothing was sampled",
        ),
        (vec![short_history], "history"),
        (vec![unknown_history], "token 160"),
        (
            (0..17).map(|id| run(id, 0, &[5], &blocks(0..1))).collect(),
            "17 runs",
        ),
        (vec![run(1, 0, &[5; 257], &blocks(0..8))], "257 tokens"),
    ];
    let expected = runner.logits(&plan(vec![good()]), &[19]).unwrap();
    for (runs, message) in cases {
        let error = runner.execute(&plan(runs)).unwrap_err().to_string();
        assert!(error.contains(message), "{error:?} does not say {message:?}");
    }
    assert!(runner.logits(&plan(vec![good()]), &[20]).is_err());
    assert!(runner.logits(&plan(vec![good()]), &[3, 2]).is_err());
    assert!(runner.finish().is_err(), "nothing was launched");
    assert!(runner.execute(&plan(vec![])).unwrap().samples.is_empty());
    assert_eq!(runner.logits(&plan(vec![good()]), &[19]).unwrap(), expected);
}
