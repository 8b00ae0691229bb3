//! Whether a plan of an earlier start is worth an attempt.

use crate::arithmetic::MAX_ATTEMPTS;
use crate::{Plan, Probed, ProfileSpec, ScenarioShape, scenario_shapes};

impl Plan {
    /// Whether the numbers can be a probe of `spec` on a device of `total` bytes. What passes is still only believed after
    /// a proof; what does not is not worth an attempt.
    pub(crate) fn is_plausible(&self, spec: &ProfileSpec, total: u64) -> bool {
        let Probed {
            measured,
            scenarios,
            weights,
            runtime,
        } = &self.probe;
        let kv = spec.probe_kv();
        let (planned, _) = scenario_shapes(&spec.limits, kv, spec.pooling);
        let steps = scenarios.iter().map(ScenarioShape::from);
        let held = [measured.kv_bytes, *weights, *runtime].map(u128::from);
        self.kv_pages > 0
            && self.cuts < MAX_ATTEMPTS
            && measured.kv_tokens == kv.capacity_tokens()
            && u128::from(measured.kv_bytes) >= u128::from(spec.page_bytes()) * kv.num_pages as u128
            && u128::from(measured.peak_reserved) >= held.iter().sum()
            && measured.peak_used <= measured.peak_reserved
            && measured.scratch_bytes <= total
            && steps.eq(planned)
    }
}
