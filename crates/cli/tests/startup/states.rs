//! Models whose layers have states of fixed size: how many requests run at once and how many tokens they have is one problem.

use plimsoll_cli::start::Started;
use plimsoll_core::Component;
use plimsoll_device::Budget;
use plimsoll_profiler::{Prediction, Setting};

use crate::prediction::{both, compare};
use crate::recovery::until_ready;
use crate::{BUDGET, Model, answers, stop};

/// Limits without the number of requests.
const FLAGS: &str = "--max-num-batched-tokens 64 --max-model-len 2048 --mem-fraction 0.95";

/// Bytes of a request's states in the three layers of the hybrid model that have some: a matrix for each of four heads, and three
/// columns of the convolution, in float32.
const SLOT: u64 = 3 * 4 * (4 * 32 * 64 + 3 * (2 * 2 * 32 + 4 * 64));

/// Tokens that one request holds on average in these tests.
const MEAN: usize = 1024;

/// The prediction of a start, which is what the start measures, or that neither fits.
fn plan(model: &Model, flags: &str, bytes: u64) -> Option<Prediction> {
    plan_for(MEAN, model, flags, bytes)
}

/// The same, where a request holds `mean` tokens on average.
fn plan_for(mean: usize, model: &Model, flags: &str, bytes: u64) -> Option<Prediction> {
    let flags = format!("{FLAGS} --mean-request-len {mean} {flags}");
    match both(&model.source(), &flags, bytes) {
        (Ok(prediction), Ok(report)) => {
            compare(&prediction, &report, &flags);
            Some(prediction)
        }
        (Err(predicted), Err(measured)) => {
            assert_eq!((predicted.exit_code(), measured.exit_code()), (4, 4), "{flags}");
            None
        }
        (predicted, measured) => panic!("{flags}, {bytes} bytes: {predicted:?} but {measured:?}"),
    }
}

/// Tokens that fit, whether or not they are of use.
fn fitting(prediction: &Prediction) -> usize {
    prediction.arithmetic.fitting_pages * prediction.sizing.block_size
}

/// As many slots as leave each the KV of half a mean request, and all of them one of full length.
#[test]
fn states_and_kv_share_the_memory() {
    let model = Model::hybrid();
    let mut counts = Vec::new();
    for bytes in [2, 3, 4, 6, 9, 12, 24, 64].map(|mebibytes| mebibytes << 20) {
        let Some(chosen) = plan(&model, "", bytes) else {
            assert!(counts.is_empty(), "{bytes} bytes are not enough, and fewer were");
            continue;
        };
        let (requests, states) = (chosen.sizing.max_num_seqs, chosen.sizing.states.clone().unwrap());
        let slots = states.slots;
        // 32 requests at once are the default of a CPU.
        assert_eq!((states.layers, requests), (3, slots.min(32)), "{bytes} bytes");
        assert_eq!(states.snapshots, slots - requests, "{bytes} bytes");
        let held = chosen
            .ready
            .components
            .iter()
            .find(|line| line.name == "states")
            .unwrap();
        assert_eq!(
            held.bytes,
            states.bytes_per_request * slots as u64,
            "{bytes} bytes"
        );
        let leaves_enough = |plan: &Prediction, slots: usize| {
            plan.sizing.full_length_requests >= 1.0 && 2 * fitting(plan) >= slots * MEAN
        };
        assert!(
            slots == 1 || leaves_enough(&chosen, slots),
            "{bytes} bytes: {chosen:?}"
        );
        // One more would leave too little to all.
        if slots < 32 {
            let more = plan(&model, &format!("--max-num-seqs {}", slots + 1), bytes);
            assert!(
                more.is_none_or(|more| !leaves_enough(&more, slots + 1)),
                "{bytes} bytes have room for more than {slots} slots"
            );
        }
        counts.push(slots);
    }
    assert!(counts.is_sorted() && counts.len() > 4, "{counts:?}");
    assert!(counts[0] < 16 && counts[counts.len() - 1] == 64, "{counts:?}");
}

/// A request more costs as many tokens as its states and a snapshot have bytes for where requests are short, or its states alone.
#[test]
fn each_side_may_be_pinned_and_the_other_follows() {
    let model = Model::hybrid();
    let bytes = 8 << 20;
    let of = |requests: usize| plan(&model, &format!("--max-num-seqs {requests}"), bytes).unwrap();
    for (slots, flag) in [(2.0, ""), (1.0, "--no-enable-prefix-caching")] {
        let of = |requests: usize| {
            let flags = format!("--max-num-seqs {requests} {flag}");
            plan_for(1, &model, &flags, bytes).unwrap()
        };
        let (few, many) = (of(2), of(12));
        assert!(fitting(&few) > fitting(&many));
        let states = few.sizing.states.clone().unwrap();
        let cost = 10.0 * slots * states.tokens_per_request as f64 * 0.95;
        let lost = (fitting(&few) - fitting(&many)) as f64;
        // More requests also take more of the step arena.
        assert!(
            lost >= cost * 0.98 && lost < cost * 1.3,
            "{lost} tokens for {cost}"
        );
    }

    let tokens = fitting(&of(6)) / 16 * 16;
    let pinned = plan(&model, &format!("--max-total-token-num {tokens}"), bytes).unwrap();
    assert!(
        pinned.sizing.kv_tokens == tokens && pinned.sizing.max_num_seqs >= 6,
        "{pinned:?}"
    );
    // One request more does not go with so many tokens.
    assert!(fitting(&pinned) >= tokens);
    assert!(
        fitting(&of(pinned.sizing.max_num_seqs + 1)) < tokens,
        "{pinned:?}"
    );
}

#[test]
fn states_that_do_not_fit_are_named_with_what_would() {
    let model = Model::hybrid();
    let flags = "--max-num-seqs 64 --max-num-batched-tokens 64 --max-model-len 256";
    let bytes = 6 << 20;
    let (predicted, measured) = both(&model.source(), flags, bytes);
    let errors = [predicted.map(drop), measured.map(drop)].map(Result::unwrap_err);
    for (error, is_measured) in errors.iter().zip([false, true]) {
        assert_eq!(error.exit_code(), 4, "{error}");
        let diagnostic = error.diagnostic().unwrap();
        assert_eq!(diagnostic.total, bytes);
        assert_eq!(diagnostic.oom.is_some(), is_measured, "{error}");
        // Nothing failed where nothing was measured, but the states alone are more than there is.
        match &diagnostic.oom {
            Some(oom) => {
                assert_eq!((oom.component, oom.requested), (Component::States, 64 * SLOT));
                assert_eq!(oom.meters.total, bytes);
                assert!(error.to_string().contains("states asked for 6.8 MiB"), "{error}");
            }
            None => assert!(diagnostic.measured_peak > Some(64 * SLOT), "{error}"),
        }
        let fewer = diagnostic.knobs.iter().find_map(|knob| {
            knob.settings.iter().find_map(|setting| match setting {
                Setting::MaxNumSeqs(requests) => Some(*requests),
                _ => None,
            })
        });
        let fewer = fewer.unwrap_or_else(|| panic!("no number of requests is advised: {error}"));
        let fits = format!("{flags} --max-num-seqs {fewer}");
        let (predicted, measured) = both(&model.source(), &fits, bytes);
        let (Ok(predicted), Ok(measured)) = (&predicted, &measured) else {
            panic!("{fewer} requests: {predicted:?}, {measured:?}")
        };
        for states in [&predicted.sizing.states, &measured.sizing.states] {
            let states = states.as_ref().unwrap();
            assert_eq!(states.bytes_per_request, SLOT);
            assert!((fewer..=2 * fewer).contains(&states.slots), "{states:?}");
        }
    }
    // Not one request: what asked, for how much, and what there was.
    let bytes = 2700 << 10;
    let few = "--max-num-batched-tokens 64 --max-model-len 256";
    let error = both(&model.source(), few, bytes).1.map(drop).unwrap_err();
    let oom = error.diagnostic().unwrap().oom.clone().unwrap();
    assert_eq!((oom.component, oom.requested), (Component::States, SLOT));
    assert_eq!(oom.meters.total, bytes);
    assert!(
        oom.meters.free < SLOT && oom.meters.reserved == bytes - oom.meters.free,
        "{oom}"
    );
    let text = error.to_string();
    assert!(
        text.contains("states asked for 109.5 KiB, 2.6 MiB of 2.6 MiB are in use"),
        "{text}"
    );
}

/// Four requests at once and four that wait: slots are held while they run, and free at the end.
#[tokio::test(flavor = "multi_thread")]
async fn slots_are_free_when_all_is_answered() {
    let (model, budget) = (Model::hybrid(), Budget::new(BUDGET));
    let ready: Started = model.start("", &budget).unwrap();
    let stats = ready.engine.stats().scheduler;
    assert_eq!((stats.slots.total, stats.slots.used), (8, 0));
    assert!(budget.meters().by_component.get(Component::States) > 0);
    let expected = answers(&ready.engine).await;
    // The same prompts again: their beginnings are found in the prefix cache, and nothing differs.
    assert_eq!(answers(&ready.engine).await, expected);
    until_ready(&ready.engine).await;
    let stats = ready.engine.stats().scheduler;
    assert_eq!((stats.slots.used, stats.prefix_queried_tokens), (0, 2 * 4 * 40));
    assert_eq!(stats.prefix_hit_tokens, 4 * 32);
    let disabled = &ready.report.disabled;
    assert!(disabled.iter().all(|off| off.path != "prefix caching"));
    stop(ready, &budget).await;
}
