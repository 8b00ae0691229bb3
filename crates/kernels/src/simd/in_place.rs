use super::{Kernel, LANES, Simd};

/// A function of single values.
pub(crate) trait Lanes {
    /// # Safety
    /// The CPU has the features of `S`.
    unsafe fn of<S: Simd>(&self, x: S::F) -> S::F;
}

/// Puts the function of each value in its place.
pub(crate) struct InPlace<'a, F>(pub(crate) &'a mut [f32], pub(crate) F);

impl<F: Lanes> Kernel for InPlace<'_, F> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self(values, function) = self;
        let (whole, rest) = values.as_chunks_mut::<LANES>();
        let mut last = [0f32; LANES];
        last[..rest.len()].copy_from_slice(rest);
        for lanes in whole.iter_mut().chain([&mut last]) {
            // SAFETY: the features are there by the caller's promise; these are sixteen values.
            unsafe { S::store(lanes.as_mut_ptr(), function.of::<S>(S::load(lanes.as_ptr()))) };
        }
        rest.copy_from_slice(&last[..rest.len()]);
    }
}
