use std::f32::consts::LOG2_E;

use plimsoll_device::cuda::GpuSlice;

use super::GpuKv;

/// What becomes of a layer's scores. [`AttentionOptions`](crate::AttentionOptions) without the window, which planners have.
#[derive(Clone, Copy, Debug)]
pub struct GpuAttentionOptions<'a> {
    /// Multiplies the scores, usually `1 / sqrt(head_dim)`; more than 0.
    pub scale: f32,
    /// Scores become `cap × tanh(score / cap)` before the softmax; more than 0.
    pub soft_cap: Option<f32>,
    /// `[heads]`: a logit of each query head that takes part in the softmax and has no value.
    pub sinks: Option<GpuSlice<'a, f32>>,
}

impl GpuAttentionOptions<'_> {
    /// # Panics
    /// If something is not as documented.
    pub(super) fn check(&self, heads: usize) {
        assert!(self.scale > 0.0);
        assert!(self.soft_cap.is_none_or(|cap| cap > 0.0));
        assert!(
            self.sinks.is_none_or(|sinks| sinks.len() == heads),
            "sinks are not [heads]"
        );
    }

    /// Index of the kernel among those without and with a soft cap.
    pub(super) fn variant(&self) -> usize {
        usize::from(self.soft_cap.is_some())
    }

    /// What makes powers of two of products with the cache's elements, or of their capped values: `scale` of the kernels.
    pub(super) fn factor(&self, kv: &GpuKv<'_>) -> f32 {
        self.soft_cap.unwrap_or(self.scale * kv.k_scale) * LOG2_E
    }

    /// What products are multiplied by before the `tanh` of a soft cap: `inner` of the kernels.
    pub(super) fn inner(&self, kv: &GpuKv<'_>) -> f32 {
        let scale = self.scale * kv.k_scale;
        self.soft_cap.map_or(0.0, |cap| 2.0 * LOG2_E * scale / cap)
    }

    /// Device address of the sinks; 0 if there are none.
    pub(super) fn sinks(&self) -> u64 {
        self.sinks.map_or(0, |sinks| sinks.ptr())
    }
}
