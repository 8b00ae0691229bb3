//! The default model against transformers, which computed with the same file's weights dequantised to f32.
//!
//! We multiply with activations rounded to 15 bits and cache f16, so logits differ by 1 to 2 parts in 10,000 of their norm.
//! Where the best token leads by more than that it must be chosen; where two tokens nearly tie either may be.

use std::fs;
use std::time::Duration;

use crate::common::smollm2::{cases, file};
use crate::common::*;
use plimsoll_model::{LoadOptions, Model};

/// In logits; their standard deviation over the vocabulary is about 4.
const NEAR_TIE: f32 = 0.01;

#[test]
fn chooses_the_tokens_that_transformers_chooses() {
    let model = Model::load(&file(), LoadOptions::default(), &budget(), &mut |_| ()).unwrap();
    assert_eq!(model.eos_token_ids(), [2]);
    assert_eq!(
        (model.kv_bytes_per_token(), model.kv_cache_dtype()),
        (2 * 30 * 192 * 2, "f16")
    );
    for case in cases() {
        let mut runner = runner(&model, 16, 8);
        let table = blocks(0..8);
        // The golden text is given, so that one near-tie does not end the comparison.
        let text = [case.prompt.as_slice(), &case.greedy[..case.greedy.len() - 1]].concat();
        let rows: Vec<usize> = (case.prompt.len() - 1..text.len()).collect();
        let logits = runner
            .logits(&plan(vec![run(1, 0, &text, &table)]), &rows)
            .unwrap();
        let vocab = model.spec().vocab_size;

        let found: Vec<f32> = case.top_tokens.iter().map(|&token| logits[token]).collect();
        let error = relative_error(&found, &case.top_logits);
        assert!(error < 1e-3, "relative error {error} after {:?}", case.prompt);

        let mut decided = 0;
        for (index, logits) in logits.chunks(vocab).enumerate() {
            let best = (0..vocab)
                .max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
                .unwrap();
            let expected = case.greedy[index] as usize;
            if case.leads[index] > NEAR_TIE {
                assert_eq!(best, expected, "token {index} after {:?}", case.prompt);
                decided += 1;
            } else {
                assert!(
                    logits[best] - logits[expected] < NEAR_TIE,
                    "token {index} after {:?}",
                    case.prompt
                );
            }
        }
        assert!(
            decided >= 20,
            "only {decided} of {} tokens were no near-tie",
            case.greedy.len()
        );

        let certain = case.leads.iter().take_while(|&&lead| lead > NEAR_TIE).count();
        let found = greedy_alone(&mut runner, &case.prompt, &table, certain);
        assert_eq!(found, case.greedy[..certain]);
    }
}

/// Time on a processor of this thread, which other work on the machine does not lengthen.
fn processor_time() -> Duration {
    let stat = fs::read_to_string("/proc/thread-self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    // In user mode and in the kernel, in hundredths of a second: fields 14 and 15, of which two come before the parenthesis.
    let ticks: u64 = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse::<u64>().unwrap())
        .sum();
    Duration::from_millis(10 * ticks)
}

#[test]
fn loads_quickly() {
    let file = file();
    let start = processor_time();
    Model::load(&file, LoadOptions::default(), &budget(), &mut |_| ()).unwrap();
    let took = processor_time() - start;
    // Half a second is usual in a release build; this is for a debug build.
    assert!(took < Duration::from_secs(5), "loading took {took:?}");
}
