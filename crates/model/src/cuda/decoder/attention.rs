//! Attention as launches, from q, k and v on.

use plimsoll_device::cuda::GpuError;
use plimsoll_kernels::CachedValues;
use plimsoll_kernels::cuda::{
    DecodeArgs, GpuAttentionOptions, GpuKvWrite, GpuNorm, GpuQkNorm, GpuRope, PrefillArgs,
};

use super::layers::{AttentionChoice, Step};
use crate::cuda::weights::GpuVector;
use crate::spec::{AttentionSpec, LayerSpec, Values};

impl<'b> Step<'_, 'b> {
    /// Of the layer's keys and values in a cache of 8 bits, which another layer may have put there.
    fn kv_scales(&self, spec: &AttentionSpec) -> [f32; 2] {
        self.decoder.weights.kv_scales[spec.shares_kv.unwrap_or(self.layer)]
    }

    /// What positions do to the layer's heads.
    fn rope(&self, spec: &AttentionSpec) -> GpuRope<'b> {
        self.rope_of(self.attention(), spec)
    }

    /// The same of layers with that choice.
    pub(super) fn rope_of(&self, choice: &AttentionChoice, spec: &AttentionSpec) -> GpuRope<'b> {
        let weights = &self.decoder.weights;
        let own = choice.rope;
        let table = own.map(|[rope, table]| &weights.ropes[rope][table]);
        GpuRope {
            positions: self.state.inputs.device(self.input.positions),
            axes: table.map_or(weights.no_axes(), |table| table.axes),
            frequencies: table.map_or(weights.no_frequencies(), |table| table.frequencies.slice()),
            factor: table.map_or(1.0, |table| table.factor),
            query_scale: spec.rope.as_deref().and_then(|rope| rope.query_scale),
        }
    }

    /// [`Operations::write_kv`](crate::blocks::Operations::write_kv). Queries stay in their place.
    pub(super) fn put_kv(
        &self,
        layer: &LayerSpec,
        spec: &AttentionSpec,
        qk_norm: Option<&[GpuVector; 2]>,
    ) -> Result<(), GpuError> {
        let Self { input, state, .. } = self;
        let norm = qk_norm.map(|[q, k]| GpuQkNorm {
            q: q.slice(),
            k: k.slice(),
            eps: layer.norm.eps,
        });
        let page = self.page();
        let eps = layer.norm.eps;
        let write = GpuKvWrite {
            kv: state.layer_kv(page, spec, self.kv_scales(spec)),
            slots: state.inputs.device(input.slots[page.table]),
            kv_heads: spec.kv_heads,
            block_size: page.slice_size.tokens(),
            head_dim: spec.head_dim,
            gated: spec.gated,
            values: match spec.values {
                Values::Projected => CachedValues::Projected,
                Values::Normalised => CachedValues::Normalised(eps),
                Values::NormalisedKeys => CachedValues::NormalisedKeys(eps),
            },
        };
        let qkv = self.rows(self.act.qkv, spec.qkv_size());
        self.decoder
            .fused
            .qk_norm_rope_kv_write(qkv, norm, self.rope(spec), write)
    }

    /// [`Operations::rotate_queries`](crate::blocks::Operations::rotate_queries). They stay in their place.
    pub(super) fn rotate(
        &self,
        layer: &LayerSpec,
        spec: &AttentionSpec,
        q_norm: Option<&GpuVector>,
    ) -> Result<(), GpuError> {
        let q = self.rows(self.act.qkv, spec.qkv_size());
        let norm = q_norm.map(|weight| GpuNorm {
            weight: weight.slice(),
            eps: layer.norm.eps,
        });
        self.decoder
            .fused
            .rotate_queries(q, spec.head_dim, norm, self.rope(spec))
    }

    /// [`Operations::attend`](crate::blocks::Operations::attend).
    pub(super) fn attend_to(&self, spec: &AttentionSpec, sinks: Option<&GpuVector>) -> Result<(), GpuError> {
        let Self { input, state, .. } = *self;
        let options = GpuAttentionOptions {
            scale: spec.scale,
            soft_cap: spec.soft_cap,
            sinks: sinks.map(GpuVector::slice),
        };
        let page = self.page();
        let kv = state.layer_kv(page, spec, self.kv_scales(spec));
        let (inputs, at) = (&state.inputs, self.attention().planners);
        let planners = &inputs.planners()[at];
        let blocks = inputs.device(input.blocks);
        let (q, out) = (
            self.rows(self.act.qkv, spec.qkv_size()),
            self.rows(self.act.attended, spec.q_size()),
        );
        if let Some(decode) = &input.decode {
            let (header, items) = decode.work[at];
            let args = DecodeArgs {
                q,
                q_stride: spec.qkv_size(),
                kv,
                runs: inputs.device(decode.runs[page.table]),
                blocks,
                header: inputs.device(header),
                items: inputs.device(items),
                out,
                scratch: self.act.scratch,
                counters: state.counters.slice(),
                options,
            };
            self.decoder.decode.forward(&planners.decode, &args)?;
        }
        if let Some(prefill) = &input.prefill {
            let (plan, items) = prefill.work[at];
            let ends = inputs.device(prefill.ends);
            let args = PrefillArgs {
                q,
                q_stride: spec.qkv_size(),
                kv,
                maps: state.kv_maps[self.layer].as_ref(),
                runs: inputs.device(prefill.runs[page.table]),
                blocks,
                items: inputs.device(items),
                out,
                scratch: self.act.scratch,
                ends: (!ends.is_empty()).then_some(ends),
                options,
            };
            self.decoder.prefill.forward(&planners.prefill, plan, &args)?;
        }
        match spec.gated {
            false => Ok(()),
            true => self
                .delta()
                .sigmoid_gate(out, spec.q_size(), q, spec.qkv_size(), spec.q_size()),
        }
    }
}
