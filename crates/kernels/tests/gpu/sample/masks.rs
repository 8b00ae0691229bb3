//! Masks as grammars make them: a few tokens, or nearly all.

use plimsoll_kernels::apply_mask;
use plimsoll_kernels::cuda::{SampleLists, SampleRow};
use rand::Rng;
use rand::rngs::StdRng;

use super::{OnGpu, assert_same_logprobs, on_cpu, random_batch, rng};

/// One to five tokens, or all but some.
fn random_mask(rng: &mut StdRng, vocab: usize) -> Vec<u32> {
    let words = vocab.div_ceil(32);
    let strict = rng.random_bool(0.7);
    let mut mask = vec![if strict { 0 } else { u32::MAX }; words];
    for _ in 0..rng.random_range(1..=5) {
        let token = rng.random_range(0..vocab);
        let bit = 1 << (token % 32);
        match strict {
            true => mask[token / 32] |= bit,
            false => mask[token / 32] &= !bit,
        }
    }
    mask
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn sample_under_strict_masks_equals_the_twin() {
    let on_gpu = OnGpu::new();
    let mut rng = rng("strict masks");
    let (mut rows_seen, mut differ) = (0, Vec::new());
    for (vocab, rows) in [(40, 200), (1000, 200), (5003, 200), (49_152, 100), (128_256, 60)] {
        let mut batch = random_batch(&mut rng, vocab, rows);
        // What is allowed must have a chance.
        batch
            .logits
            .iter_mut()
            .filter(|x| !x.is_finite())
            .for_each(|x| *x = -3.0);
        let words = vocab.div_ceil(32);
        let masks: Vec<u32> = (0..rows).flat_map(|_| random_mask(&mut rng, vocab)).collect();
        // Every third row is free, whatever its mask says.
        let masked = |row: usize| !row.is_multiple_of(3);
        let mut lists = SampleLists::default();
        let specs: Vec<SampleRow> = batch
            .specs
            .iter()
            .enumerate()
            .map(|(at, spec)| {
                let row = SampleRow::new(spec, None, &mut lists);
                if masked(at) { row.masked() } else { row }
            })
            .collect();
        let got = on_gpu.run_rows(&batch, &specs, &lists, &[], Some(&masks));
        for (row, logits) in batch
            .logits
            .chunks_mut(vocab)
            .enumerate()
            .filter(|(row, _)| masked(*row))
        {
            apply_mask(logits, &masks[row * words..][..words]);
        }
        let want = on_cpu(&batch);
        for (row, (got, want)) in got.iter().zip(&want).enumerate() {
            let context = format!("vocabulary {vocab}, row {row}: {:?}", batch.specs[row].params);
            let (got, want) = (got.as_ref().expect(&context), want.as_ref().expect(&context));
            let allowed = masks[row * words + got.0 as usize / 32] >> (got.0 % 32) & 1 == 1;
            assert!(allowed || !masked(row), "{context}: {} is forbidden", got.0);
            rows_seen += 1;
            if got.0 != want.0 {
                differ.push(format!("{context}: {} for {}", got.0, want.0));
            } else if let (Some(got), Some(want)) = (&got.1, &want.1) {
                assert_same_logprobs(got, want, &context);
            }
        }
    }
    assert!(
        differ.len() * 500 <= rows_seen,
        "{} of {rows_seen}: {differ:?}",
        differ.len()
    );
}
