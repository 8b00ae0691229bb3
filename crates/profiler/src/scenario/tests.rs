use std::collections::HashSet;

use plimsoll_core::{BlockSize, CacheGroups, CacheKind, CacheLayout};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::ProfileSpec;

fn limits(batched: usize, seqs: usize, model_len: usize) -> StepLimits {
    StepLimits {
        max_num_batched_tokens: batched,
        max_num_seqs: seqs,
        max_model_len: model_len,
    }
}

fn kv(num_blocks: usize) -> KvConfig {
    KvConfig {
        block_size: BlockSize::default(),
        num_pages: num_blocks,
        groups: CacheGroups::default(),
        state_slots: 0,
    }
}

fn shapes(scenarios: &[Scenario], kind: ScenarioKind) -> Vec<(usize, usize)> {
    let scenario = scenarios.iter().find(|scenario| scenario.kind == kind).unwrap();
    scenario
        .plan
        .runs
        .iter()
        .map(|run| (run.start, run.end()))
        .collect()
}

/// Each request begins with a snapshot as far as there are any, and writes a slot of its own, which no other reads.
#[test]
fn states_are_found_in_snapshots() {
    for (state_slots, snapshots) in [(8, 4), (6, 2), (4, 0)] {
        let groups = CacheGroups::default().with_states(3);
        let kv = KvConfig {
            groups,
            state_slots,
            ..kv(512)
        };
        let (all, _) = scenarios(Contexts::All, &limits(512, 4, 2048), 1000, kv, None);
        for Scenario { kind, plan } in all {
            let states: Vec<RunState> = plan.runs.iter().map(|run| run.state.unwrap()).collect();
            let written: HashSet<StateSlot> = states.iter().map(|state| state.after).collect();
            assert_eq!(written.len(), plan.runs.len(), "{kind:?}");
            for (run, state) in plan.runs.iter().zip(&states) {
                assert_eq!(state.before.is_some(), run.start > 0, "{kind:?}");
                let others = state.before.filter(|&before| before != state.after);
                assert!(
                    others.is_none_or(|slot| !written.contains(&slot)),
                    "{kind:?}: {states:?}"
                );
                assert!(
                    state.before.is_none_or(|slot| slot.index() < state_slots),
                    "{kind:?}: {states:?}"
                );
            }
            if kind == ScenarioKind::Decode {
                let read = states.iter().filter(|state| state.before != Some(state.after));
                assert_eq!(read.count(), snapshots, "{states:?}");
            }
        }
    }
}

#[test]
fn every_worst_case_is_in() {
    let (all, left_out) = scenarios(Contexts::All, &limits(512, 4, 2048), 1000, kv(512), None);
    let included: Vec<_> = left_out
        .iter()
        .map(|left| (left.kind, left.reason.as_str()))
        .collect();
    let of_others = [
        (ScenarioKind::PromptLogprobs, "the step `mixed` includes it"),
        (ScenarioKind::Prefill, "the step `long_prefix` includes it"),
        (ScenarioKind::SampleSort, "the step `mixed` includes it"),
    ];
    assert_eq!(included, of_others);
    assert_eq!(shapes(&all, ScenarioKind::LongPrefix), [(1536, 2048)]);
    assert_eq!(shapes(&all, ScenarioKind::Decode), [(2047, 2048); 4]);
    assert_eq!(shapes(&all, ScenarioKind::SampleTopK), [(0, 1); 4]);
    let mixed = [(2047, 2048), (2047, 2048), (2047, 2048), (0, 509)];
    assert_eq!(shapes(&all, ScenarioKind::Mixed), mixed);
    // Where nothing includes them.
    let (alone, _) = scenarios(Contexts::All, &limits(4, 4, 4), 1000, kv(512), None);
    assert_eq!(shapes(&alone, ScenarioKind::Prefill), [(0, 4)]);
    assert_eq!(shapes(&alone, ScenarioKind::SampleSort), [(3, 4); 4]);
    let all = all.into_iter().chain(alone);
    let everything = [
        ScenarioKind::Mixed,
        ScenarioKind::LongPrefix,
        ScenarioKind::SampleSort,
    ];
    for Scenario { plan, .. } in all.filter(|scenario| everything.contains(&scenario.kind)) {
        for run in &plan.runs {
            let spec = run.sample.as_ref().unwrap();
            assert_eq!(
                (spec.params.logprobs(), spec.history.len()),
                (Some(20), run.end())
            );
            assert!(spec.params.top_p() < 1.0 && !spec.params.logit_bias().is_empty());
        }
    }
}

/// A probe has no room for more, and `decode` need not repeat what `mixed` does.
#[test]
fn as_many_contexts_are_the_longest_as_the_cache_holds() {
    let (long, short) = ((2047, 2048), (1, 2));
    for (blocks, held) in [(900, 7), (300, 2), (128, 1), (100, 1)] {
        let (limits, kv) = (limits(512, 8, 2048), kv(blocks));
        let of = |rows: usize| (0..rows).map(move |row| if row < held { long } else { short });
        let (proof, _) = scenarios(Contexts::All, &limits, 1000, kv, None);
        let (probe, _) = scenarios(Contexts::Held, &limits, 1000, kv, None);
        for all in [&proof, &probe] {
            let decode = shapes(all, ScenarioKind::Decode);
            assert!(decode.into_iter().eq(of(8)), "{blocks}");
            assert_eq!(shapes(all, ScenarioKind::LongPrefix), [(1536, 2048)]);
        }
        let [proved, probed] = [&proof, &probe].map(|all| {
            let mut rows = shapes(all, ScenarioKind::Mixed);
            assert_eq!(rows.pop(), Some((0, 505)));
            rows
        });
        assert_eq!(proved, [long; 7]);
        assert!(probed.into_iter().eq(of(7)), "{blocks}");
    }
    // Without `mixed` there is nothing else that has all of them.
    let (alone, _) = scenarios(Contexts::Held, &limits(8, 8, 2048), 1000, kv(300), None);
    assert_eq!(shapes(&alone, ScenarioKind::Decode), [long; 8]);
    assert_eq!(shapes(&alone, ScenarioKind::SampleSort), [long; 8]);
}

/// Where contexts take no memory, a probe computes no long prefix, and all else as ever.
#[test]
fn a_probe_may_have_a_short_prefix() {
    for (context, start) in [(8192, 1024), (1600, 1024), (1500, 988)] {
        let (limits, kv) = (limits(512, 8, context), kv(900));
        let (short, left_out) = scenarios(Contexts::Short, &limits, 1000, kv, None);
        let (long, also_left_out) = scenarios(Contexts::Held, &limits, 1000, kv, None);
        assert_eq!(left_out, also_left_out);
        for Scenario { kind, plan } in &long {
            let rows = shapes(&short, *kind);
            if *kind == ScenarioKind::LongPrefix {
                assert_eq!(rows, [(start, start + 512)]);
                assert_eq!(shapes(&long, *kind), [(context - 512, context)]);
            } else {
                assert_eq!(rows, shapes(&long, *kind), "{kind}");
            }
            assert_eq!(plan.runs.len(), rows.len());
        }
    }
}

#[test]
fn the_worst_step_scores_every_prompt_token_it_has() {
    let scored = |kind, batched, seqs| {
        let (all, _) = scenarios(Contexts::All, &limits(batched, seqs, 2048), 1000, kv(512), None);
        let scenario = all.into_iter().find(|scenario| scenario.kind == kind).unwrap();
        let of = |run: &Run| {
            run.score
                .as_ref()
                .map(|score| (score.first, score.targets.len(), score.top))
        };
        let runs = scenario.plan.runs.iter();
        runs.map(|run| (of(run), run.sample.is_some()))
            .collect::<Vec<_>>()
    };
    let mixed = scored(ScenarioKind::Mixed, 512, 3);
    assert_eq!(mixed, [(None, true), (None, true), (Some((0, 509, 20)), true)]);
    assert_eq!(
        scored(ScenarioKind::PromptLogprobs, 512, 1),
        [(Some((0, 511, 20)), true)]
    );
    // A prompt that is computed token by token.
    assert_eq!(
        scored(ScenarioKind::PromptLogprobs, 2, 4),
        [(Some((0, 1, 20)), false), (None, true)]
    );
}

#[test]
fn embeddings_have_the_same_steps_but_for_logits() {
    let (limits, kv) = (limits(512, 4, 2048), kv(512));
    let (all, left_out) = scenarios(Contexts::All, &limits, 1000, kv, Some(Pooling::Mean));
    let mut runs = all.iter().flat_map(|scenario| &scenario.plan.runs);
    assert!(runs.all(|run| run.sample.is_none() && run.score.is_none() && run.pool == Some(Pooling::Mean)));
    assert_eq!(shapes(&all, ScenarioKind::Decode), [(2047, 2048); 4]);
    let kinds: Vec<_> = left_out.iter().map(|left| left.kind).collect();
    let without = [
        ScenarioKind::PromptLogprobs,
        ScenarioKind::Prefill,
        ScenarioKind::SampleSort,
        ScenarioKind::SampleTopK,
    ];
    assert_eq!(kinds, without);
    let sizes = scenario_shapes(&limits, kv, Some(Pooling::Mean)).0;
    assert_eq!(sizes.len(), all.len());
}

#[test]
fn unreachable_shapes_are_left_out_with_the_reason() {
    let left_out = |limits| {
        let (reached, left_out) = scenarios(Contexts::All, &limits, 1000, kv(1024), None);
        assert_eq!(reached.len() + left_out.len(), ScenarioKind::ALL.len());
        left_out
            .into_iter()
            .map(|left| (left.kind, left.reason))
            .collect::<Vec<_>>()
    };
    let reasons = left_out(limits(4096, 8, 2048));
    assert_eq!(reasons[0].0, ScenarioKind::PromptLogprobs);
    assert_eq!(reasons[1].0, ScenarioKind::LongPrefix);
    assert!(reasons[1].1.contains("--max-num-batched-tokens"), "{reasons:?}");
    assert_eq!(left_out(limits(64, 1, 2048))[0].0, ScenarioKind::Mixed);
    assert_eq!(left_out(limits(8, 8, 2048))[0].0, ScenarioKind::Mixed);
    assert_eq!(left_out(limits(8, 4, 1)).len(), 3);
}

#[test]
fn a_full_step_of_short_requests_is_several_prompts() {
    let (all, _) = scenarios(Contexts::All, &limits(100, 8, 40), 1000, kv(512), None);
    let mixed = shapes(&all, ScenarioKind::Mixed);
    assert_eq!(
        (
            mixed.len(),
            mixed.iter().map(|(start, end)| end - start).sum::<usize>()
        ),
        (8, 100)
    );
    assert_eq!(mixed[5..], [(0, 15), (0, 40), (0, 40)]);
}

/// No plan exceeds the limits, every table is long enough, and no step writes a block twice; and the probe's cache holds
/// the largest steps in full.
#[test]
fn plans_are_legal_under_any_limits() {
    for seed in 0..3000 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut up_to = |most: usize| rng.random_range(1..=most);
        let limits = limits(up_to(700), up_to(60), up_to(900));
        let block_size = BlockSize::new([8, 16, 32][up_to(3) - 1]).unwrap();
        let vocab = up_to(300);
        let mut spec = ProfileSpec::new(limits, vocab, block_size, 1);
        let kinds = [
            CacheKind::Full,
            CacheKind::Window(up_to(100)),
            CacheKind::Window(up_to(900)),
        ];
        let layers: Vec<_> = (0..up_to(6)).map(|_| kinds[up_to(3) - 1]).collect();
        spec.groups = CacheLayout::new(&layers, 1000).unwrap().groups;
        let probe = spec.probe_kv();
        let final_size = spec.kv(spec.request_pages() + up_to(200) - 1);
        for (kv, contexts) in [
            (probe, Contexts::Held),
            (probe, Contexts::Short),
            (probe, Contexts::All),
            (final_size, Contexts::All),
        ] {
            let (all, left_out) = scenarios(contexts, &limits, vocab, kv, None);
            let (sizes, left_out_sizes) = scenario_shapes(&limits, kv, None);
            assert_eq!(
                (sizes.len(), left_out_sizes),
                (all.len(), left_out),
                "seed {seed}"
            );
            for (Scenario { kind, plan }, size) in all.iter().zip(&sizes) {
                let expected = ScenarioShape {
                    kind: *kind,
                    rows: plan.runs.len(),
                    tokens: plan.num_tokens(),
                };
                assert_eq!(*size, expected, "seed {seed}");
                let sampled = plan.runs.iter().filter(|run| run.sample.is_some()).count();
                let read = (sampled, plan.num_scored());
                assert_eq!((size.sampled(), size.scored()), read, "seed {seed}, {kind}");
                check(plan, &limits, kv, vocab, &format!("seed {seed}, {kind}"));
            }
            if kv == probe {
                let most = all
                    .iter()
                    .map(|scenario| scenario.plan.num_tokens())
                    .max()
                    .unwrap();
                let reachable = limits
                    .max_num_batched_tokens
                    .min(limits.max_num_seqs * limits.max_model_len);
                assert_eq!(most, reachable, "seed {seed}");
            }
        }
    }
}

fn check(plan: &StepPlan, limits: &StepLimits, kv: KvConfig, vocab: usize, context: &str) {
    assert!(
        !plan.is_empty() && plan.runs.len() <= limits.max_num_seqs,
        "{context}"
    );
    assert!(plan.num_tokens() <= limits.max_num_batched_tokens, "{context}");
    let block_size = kv.block_size;
    let mut written = HashSet::new();
    let mut requests = HashSet::new();
    for run in &plan.runs {
        assert!(requests.insert(run.request), "{context}");
        assert!(
            !run.input.is_empty() && run.end() <= limits.max_model_len,
            "{context}"
        );
        assert_eq!(run.tables.len(), kv.groups.as_slice().len(), "{context}");
        for (table, group) in run.tables.iter().zip(&kv.groups) {
            // Whole blocks, from the first that the first query sees.
            let seen = group.first_block(block_size, run.start);
            let blocks = block_size.blocks_for(run.end()) - seen;
            assert_eq!(
                (table.first, table.pages.len()),
                (seen, blocks * group.pages_per_block),
                "{context}"
            );
            assert!(
                table.pages.iter().all(|page| page.index() < kv.num_pages),
                "{context}"
            );
            let own = (run.start / block_size.tokens() - seen) * group.pages_per_block;
            for page in &table.pages[own..] {
                assert!(written.insert(*page), "{context}: {page:?} is written twice");
            }
        }
        let RunInput::Known(tokens) = &run.input else {
            panic!("{context}")
        };
        if let Some(score) = &run.score {
            let last = tokens.len() - usize::from(run.sample.is_some());
            assert!(!score.targets.is_empty() && score.rows().end <= last, "{context}");
            assert!(
                score.targets.iter().all(|&token| (token as usize) < vocab),
                "{context}"
            );
        }
        assert!(tokens.iter().all(|&token| (token as usize) < vocab), "{context}");
    }
}
