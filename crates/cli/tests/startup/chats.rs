//! Chats of ten turns: how much of what was computed before the next turn finds.

use futures::StreamExt;
use plimsoll_core::{Event, Request, RequestOptions, SamplingOptions, TokenId};
use plimsoll_device::Budget;
use plimsoll_engine::EngineHandle;

use crate::{BUDGET, Model, stop};

const TURNS: usize = 10;
const CHATS: u32 = 3;

/// The head of an answer, which a template adds to a prompt.
const HEAD: [TokenId; 3] = [250, 251, 252];

/// A greedy answer, and how many tokens of the prompt were found.
async fn ask(engine: &EngineHandle, prompt: &[TokenId], max_tokens: usize) -> (Vec<TokenId>, usize) {
    let options = RequestOptions {
        prompt: prompt.to_vec(),
        max_tokens: Some(max_tokens),
        sampling: SamplingOptions {
            temperature: Some(0.0),
            ..Default::default()
        },
        ..Default::default()
    };
    let request = Request::new(engine.next_id(), options, &engine.limits()).unwrap();
    let mut events = engine.submit(request).unwrap();
    let (mut answer, mut found) = (Vec::new(), 0);
    while let Some(event) = events.next().await {
        match event {
            Event::Admitted { cached_tokens } => found = cached_tokens,
            Event::Token(token) => answer.push(token.token),
            other => panic!("{other:?}"),
        }
    }
    (answer, found)
}

/// What a chat of ten turns was answered, and of its prompts how many tokens were computed before and how many of these were
/// found. A template that leaves the reasoning of past answers out repeats neither their heads nor their first halves.
async fn chat(
    engine: &EngineHandle,
    chat: u32,
    forgets_reasoning: bool,
) -> (Vec<Vec<TokenId>>, usize, usize) {
    // A system prompt that all chats share, after whose first turn it is there for all.
    let mut history: Vec<TokenId> = (0..100).map(|at| at * 7 % 240).collect();
    let mut computed: Vec<Vec<TokenId>> = Vec::new();
    let (mut answers, mut known, mut found) = (Vec::new(), 0, 0);
    for turn in 0..TURNS as u32 {
        let message = (0..20 + 5 * (turn % 4)).map(|at| (chat * 31 + turn * 17 + at * 3) % 240);
        history.extend(message);
        let prompt = [history.as_slice(), &HEAD].concat();
        let (answer, cached) = ask(engine, &prompt, 40).await;
        let common = |earlier: &Vec<TokenId>| {
            let same = earlier.iter().zip(&prompt[..prompt.len() - 1]);
            same.take_while(|(a, b)| a == b).count()
        };
        known += computed.iter().map(common).max().unwrap_or(0);
        found += cached;
        match forgets_reasoning {
            true => history.extend(&answer[answer.len() / 2..]),
            false => history = [prompt.as_slice(), &answer].concat(),
        }
        // The last token of an answer is never computed.
        computed.push([prompt.as_slice(), &answer[..answer.len() - 1]].concat());
        answers.push(answer);
    }
    (answers, known, found)
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_turns_find_nine_tenths_of_what_was_computed() {
    let (model, budget) = (Model::hybrid(), Budget::new(BUDGET));
    // Three of at most eight at once: there are slots for the ends of prompts and of answers.
    let flags = "--max-model-len 2048 --max-num-batched-tokens 128 --max-num-seqs 8";
    let without = model
        .start(&format!("{flags} --no-enable-prefix-caching"), &budget)
        .unwrap();
    let mut expected = Vec::new();
    for (index, forgets) in (0..CHATS).flat_map(|index| [(index, false), (index, true)]) {
        let (answers, known, found) = chat(&without.engine, index, forgets).await;
        assert!(
            known > 1000 && found == 0,
            "{known} tokens were computed, {found} found"
        );
        expected.push(answers);
    }
    stop(without, &budget).await;

    let ready = model.start(flags, &budget).unwrap();
    for forgets_reasoning in [false, true] {
        let before = ready.engine.stats().scheduler;
        let chats = (0..CHATS).map(|index| chat(&ready.engine, index, forgets_reasoning));
        let chats = futures::future::join_all(chats).await;
        let (mut known, mut found) = (0, 0);
        for (index, (answers, of_chat, hits)) in chats.into_iter().enumerate() {
            assert_eq!(
                answers,
                expected[2 * index + usize::from(forgets_reasoning)],
                "chat {index}"
            );
            known += of_chat;
            found += hits;
        }
        let after = ready.engine.stats().scheduler;
        assert_eq!(after.prefix_hit_tokens - before.prefix_hit_tokens, found as u64);
        assert!(
            found * 10 >= known * 9,
            "{found} tokens were found of {known}, forgetting reasoning: {forgets_reasoning}, {after:?}"
        );
    }
    let prompt: Vec<TokenId> = (0..100).map(|at| at * 11 % 240).collect();
    let (answer, found) = ask(&ready.engine, &prompt, 8).await;
    assert_eq!(found, 0);
    assert_eq!(ask(&ready.engine, &prompt, 8).await, (answer.clone(), 80));
    assert!(ready.engine.forget_cached().await);
    assert_eq!(ask(&ready.engine, &prompt, 8).await, (answer, 0));
    stop(ready, &budget).await;
}
