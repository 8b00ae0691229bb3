//! The sums of rows' experts: `kernels/moe_combine.cu`.

use half::bf16;
use plimsoll_device::cuda::{GpuError, GpuSlice, Launch};

use super::{GpuExpertOutputs, MoeKernels, VEC, address_of, fp8_args, int};
use crate::cuda::linear::GpuRows;
use crate::cuda::{FusedKernels, GpuNorm};

const COMBINE_THREADS: usize = 128;

impl MoeKernels {
    /// The sums of each row's experts into `out`, `[rows, n]`. With gates, the sigmoid of each times the shared expert's output, which is in
    /// `out` unless routes have that expert, is added, as [`add_gated`](crate::add_gated) does.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn combine(&self, outputs: &GpuExpertOutputs<'_>, out: GpuSlice<'_, bf16>) -> Result<(), GpuError> {
        let n = outputs.width(out);
        if outputs.routes.rows == 0 {
            return Ok(());
        }
        let args = [
            outputs.x.into(),
            outputs.routes.places.into(),
            outputs.routes.weights.into(),
            address_of(outputs.gates),
            outputs.of_shared(out).into(),
            out.into(),
            int(n),
            int(outputs.routes.top_k),
        ];
        let blocks = (n / VEC).div_ceil(COMBINE_THREADS) as u32;
        let launch = Launch::new([outputs.routes.rows as u32, blocks, 1], COMBINE_THREADS as u32);
        self.launch(&self.combine, launch, &args)
    }

    /// `hidden +=` what [`Self::combine`] makes of `delta`, then its norm into `out`; all `[rows, n]`: bit for bit that and
    /// [`FusedKernels::add_rms_norm`](crate::cuda::FusedKernels::add_rms_norm). `delta` is read where there are gates but no
    /// shared expert among routes, and stays as it is.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn add_rms_norm(
        &self,
        outputs: &GpuExpertOutputs<'_>,
        [hidden, delta]: [GpuSlice<'_, bf16>; 2],
        norm: GpuNorm<'_>,
        out: GpuRows<'_>,
    ) -> Result<(), GpuError> {
        let (rows, n) = (outputs.routes.rows, outputs.width(delta));
        if rows == 0 {
            return Ok(());
        }
        assert_eq!(
            (hidden.len(), out.len(), norm.weight.len()),
            (rows * n, rows * n, n),
            "rows of {n}"
        );
        let (vecs, launch) = FusedKernels::rows_of_norms(&self.gpu, out.len(), n);
        let sources = [
            outputs.x.into(),
            outputs.routes.places.into(),
            outputs.routes.weights.into(),
            address_of(outputs.gates),
            outputs.of_shared(delta).into(),
            int(outputs.routes.top_k),
            hidden.into(),
            norm.weight.into(),
        ];
        let shape = [int(n), norm.eps.into()];
        let [plain, fp8] = &self.add_rms_norm;
        match out {
            GpuRows::Bf16(out) => {
                let args = [&sources[..], &[out.into()], &shape].concat();
                self.launch(&plain[vecs - 1], launch, &args)
            }
            GpuRows::Fp8(out) => {
                let args = [&sources[..], &fp8_args(&out, rows, n), &shape].concat();
                self.launch(&fp8[vecs - 1], launch, &args)
            }
        }
    }
}
