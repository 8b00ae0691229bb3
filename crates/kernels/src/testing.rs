//! Helpers of this crate's tests.

use plimsoll_core::Scratch;
use plimsoll_device::{Arena, Budget};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

pub(crate) fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

/// Seeds of a randomised test: a fixed few, and a fresh one that a failure prints.
pub(crate) fn seeds(fixed: u64) -> impl Iterator<Item = u64> {
    (0..fixed).chain([rand::random()])
}

/// Roughly normal values.
pub(crate) fn normal(rng: &mut StdRng, len: usize) -> Vec<f32> {
    let mut draw = || (0..6).map(|_| rng.random_range(-0.7f32..0.7)).sum();
    (0..len).map(|_| draw()).collect()
}

pub(crate) fn budget() -> Budget {
    Budget::new(1 << 32)
}

pub(crate) fn arena() -> Arena {
    Arena::new(&budget(), Scratch::Growable).expect("an empty arena")
}

/// Fails unless `|got - want| <= tolerance × |want|` in the Euclidean norm. NaN fails.
#[track_caller]
pub(crate) fn assert_close(got: &[f32], want: &[f64], tolerance: f64, context: &str) {
    assert_eq!(got.len(), want.len(), "{context}");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let error = norm(&mut got.iter().zip(want).map(|(&g, &w)| f64::from(g) - w));
    let size = norm(&mut want.iter().copied());
    assert!(
        error <= tolerance * size,
        "{context}: error {error:e} of {size:e}"
    );
}

#[track_caller]
pub(crate) fn assert_same_bits(a: &[f32], b: &[f32], context: &str) {
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(a), bits(b), "{context}");
}
