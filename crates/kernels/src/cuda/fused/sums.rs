//! Sums with norms where no norm follows.

use half::bf16;
use plimsoll_device::cuda::{GpuError, GpuSlice};

use super::{FusedKernels, GpuNorm, address, int};

impl FusedKernels {
    /// `hidden += delta`, or the norm of `delta`, both `[tokens, n]`; then times `factor`, and times `scalar` (`[1]`) if there is one;
    /// one rounding. Twin of [`add_normed`](crate::add_normed).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn add_normed(
        &self,
        hidden: GpuSlice<'_, bf16>,
        delta: GpuSlice<'_, bf16>,
        n: usize,
        norm: Option<GpuNorm<'_>>,
        (factor, scalar): (f32, Option<GpuSlice<'_, f32>>),
    ) -> Result<(), GpuError> {
        assert_eq!(hidden.len(), delta.len(), "lengths differ");
        assert!(
            norm.is_none_or(|norm| norm.weight.len() == n),
            "the norm is not [n]"
        );
        assert!(
            scalar.is_none_or(|scalar| scalar.len() == 1),
            "a scalar is one number"
        );
        let (vecs, launch) = Self::rows_of_norms(&self.gpu, hidden.len(), n);
        let args = [
            hidden.into(),
            delta.into(),
            address(norm.map(|norm| norm.weight)),
            address(scalar),
            factor.into(),
            int(n),
            norm.map_or(0.0, |norm| norm.eps).into(),
        ];
        self.launch(&self.add_normed[vecs - 1], launch, &args)
    }

    /// The sum of the norms of `x` and `y`, both `[tokens, n]`, with these weights (`[n]`) and one `eps`, in the place of `x`; one
    /// rounding.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn sum_norms(
        &self,
        x: GpuSlice<'_, bf16>,
        y: GpuSlice<'_, bf16>,
        [x_weight, y_weight]: [GpuSlice<'_, f32>; 2],
        eps: f32,
    ) -> Result<(), GpuError> {
        let n = x_weight.len();
        assert_eq!(x.len(), y.len(), "lengths differ");
        assert_eq!(y_weight.len(), n, "norms of different widths");
        let (vecs, launch) = Self::rows_of_norms(&self.gpu, x.len(), n);
        let args = [
            x.into(),
            y.into(),
            x_weight.into(),
            y_weight.into(),
            int(n),
            eps.into(),
        ];
        self.launch(&self.sum_norms[vecs - 1], launch, &args)
    }
}
