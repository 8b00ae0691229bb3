//! The network on a CPU: the blocks' operations on `f32` activations in the step arena.

mod activations;
mod beside;
mod images;
mod vocabulary;

use std::sync::Arc;

use half::f16;
use plimsoll_core::{ExpertLoads, KvConfig, StepError};
use plimsoll_device::Arena;
use plimsoll_kernels::{
    AttentionOptions, CachedValues, DeltaGates, Embedding, Exchange, ExpertBuffers, ExpertWeights, KvElement,
    KvLayout, Linear, PagedKvMut, QkNorm, Rotation, Route, Router, Sees, add_gated, add_normed, add_rms_norm,
    attention, causal_conv, experts, gated_delta_rule, glu, qk_norm_rope_kv_write, rms_norm, rotate_queries,
    route, sandwich_norm, sigmoid_gate,
};

use activations::Activations;

pub(crate) use activations::activation_elements;
pub(crate) use vocabulary::{Head, LOGIT_ROWS, logit_elements};

use crate::batch::Batch;
use crate::blocks::{self, Beside, DeltaRule, LayerInput, Moe, Norms, Operations};
use crate::rope::{RopeSpec, RopeTable};
use crate::spec::{AttentionSpec, DeltaNetSpec, DenseMlpSpec, LayerSpec, MoeSpec, PerLayerSpec, Values};
use crate::state::{KvCache, KvElementType, LayerPlace, StateCache};
use crate::tables::LayerPage;
use crate::weights::Loader;
use crate::{DecoderSpec, ModelError};

/// The decoder's weights.
#[derive(Debug)]
pub(crate) struct Decoder {
    spec: DecoderSpec,
    weights: blocks::Decoder<Embedding, Arc<Linear>, Vec<f32>>,
    ropes: Vec<Rope>,
    /// Where tokens go, if the model has experts.
    pub(crate) expert_loads: Option<Arc<ExpertLoads>>,
}

/// Rotary positions of some layers.
#[derive(Debug)]
struct Rope {
    spec: RopeSpec,
    tables: Vec<RopeTable>,
    /// The dimension of each pair, where positions have three.
    axes: Option<Vec<usize>>,
}

impl Decoder {
    pub(crate) fn load(spec: &DecoderSpec, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        let weights = blocks::Decoder::visit(spec, loader)?;
        let rope = |rope: &RopeSpec| Rope {
            spec: rope.clone(),
            tables: rope.scaled_tables(weights.rope_factors.as_deref()),
            axes: rope.sections.map(|sections| sections.axes()),
        };
        Ok(Self {
            ropes: spec.ropes().into_iter().map(rope).collect(),
            expert_loads: spec.expert_loads().map(Arc::new),
            spec: spec.clone(),
            weights,
        })
    }

    /// Whether positions have three dimensions.
    pub(crate) fn has_axes(&self) -> bool {
        self.ropes.iter().any(|rope| rope.axes.is_some())
    }

    /// Runs the batch through all layers and extends its requests' KV and states. Returns the given rows of it, ascending, behind
    /// the last norm: `[rows, hidden_size]`. The state serves contexts of up to `max_model_len` tokens.
    pub(crate) fn forward<'a>(
        &self,
        batch: &Batch<'_>,
        rows: &[usize],
        cache: (&mut KvCache, &mut StateCache),
        max_model_len: usize,
        arena: &'a Arena,
        exchange: Option<&mut Exchange>,
    ) -> Result<&'a [f32], StepError> {
        match cache.0.element {
            KvElementType::F32 => self.forward_as::<f32>(batch, rows, cache, max_model_len, arena, exchange),
            KvElementType::F16 => self.forward_as::<f16>(batch, rows, cache, max_model_len, arena, exchange),
        }
    }

    fn forward_as<'a, E: KvElement>(
        &self,
        batch: &Batch<'_>,
        rows: &[usize],
        (kv, states): (&mut KvCache, &mut StateCache),
        max_model_len: usize,
        arena: &'a Arena,
        exchange: Option<&mut Exchange>,
    ) -> Result<&'a [f32], StepError> {
        let spec = &self.spec;
        let n = batch.tokens.len();
        let mut step = Step {
            batch,
            places: LayerPlace::all(spec, &kv.pages),
            states: states.layers_mut(spec),
            given: rows,
            ropes: Vec::with_capacity(self.ropes.len()),
            kv: kv.slab.as_mut_slice::<E>(),
            kv_config: kv.config,
            kv_column: spec.kv_column(),
            expert_loads: self.expert_loads.as_deref(),
            arena,
            exchange,
            rows: n,
            is_fresh: true,
            layer: 0,
            act: Activations::new(spec, n, arena)?,
        };
        let mut angles = std::mem::take(&mut step.act.angles);
        for rope in &self.ropes {
            let table = &rope.tables[rope.spec.variant(max_model_len)];
            let (own, rest) = angles.split_at_mut(n * rope.spec.rotary_dim);
            images::angles_of(rope, table, batch, own);
            step.ropes.push((&rope.spec, own));
            angles = rest;
        }
        step.embed(&self.weights.embedding, spec)?;
        step.put_image();
        if let (Some(per_layer), Some(own)) = (&self.weights.per_layer, &spec.per_layer) {
            let scale = (own.width as f32).sqrt();
            per_layer
                .table
                .forward(batch.tokens, scale, step.act.layer_inputs);
        }
        self.weights.forward(spec, &mut step)?;
        let len = rows.len() * spec.hidden_size;
        Ok(&step.act.normed[..len])
    }

    /// From normalised rows to logits, `[rows, vocab_size]`; none where the model is for embeddings.
    pub(crate) fn head(&self) -> Option<Head<'_>> {
        let linear = self.weights.head.as_deref()?;
        Some(Head::new(linear, self.spec.logit_soft_cap))
    }
}

/// A step on its way through the layers.
struct Step<'a, 'b, E> {
    batch: &'b Batch<'b>,
    /// Of each layer.
    places: Vec<LayerPlace>,
    /// Of each layer that has any: those of the convolution and of the recurrence.
    states: Vec<[&'b mut [f32]; 2]>,
    /// Rows that are given out.
    given: &'b [usize],
    /// Each kind of rotary positions, and the angles of all rows.
    ropes: Vec<(&'b RopeSpec, &'a [f32])>,
    kv: &'b mut [E],
    kv_config: KvConfig,
    /// As [`DecoderSpec::kv_column`].
    kv_column: usize,
    expert_loads: Option<&'b ExpertLoads>,
    arena: &'a Arena,
    /// Where it meets the other ranks, if there are any.
    exchange: Option<&'b mut Exchange>,
    /// Rows that are computed.
    rows: usize,
    /// Nothing is to be added to the residual stream yet.
    is_fresh: bool,
    /// Index of the layer.
    layer: usize,
    act: Activations<'a>,
}

impl<'a, E: KvElement> Step<'a, '_, E> {
    fn add_norm(&mut self, norms: &Norms<'_, Vec<f32>>) {
        let Norms { added, weight, eps } = *norms;
        let len = self.rows * weight.len();
        let (hidden, delta) = (&mut self.act.hidden[..len], &mut self.act.delta[..len]);
        let normed = &mut self.act.normed[..len];
        if std::mem::take(&mut self.is_fresh) {
            return rms_norm(hidden, weight, eps, normed);
        }
        match added {
            None => add_rms_norm(hidden, delta, weight, eps, normed),
            Some(added) => sandwich_norm(hidden, delta, added, weight, eps, normed),
        }
    }

    /// What positions do to the layer's heads.
    fn rotation(&self, spec: &AttentionSpec) -> Rotation<'a> {
        let rope = spec.rope.as_deref();
        let own = rope.and_then(|rope| self.ropes.iter().find(|(known, _)| *known == rope));
        Rotation {
            angles: own.map(|(_, angles)| *angles).unwrap_or_default(),
            query_scale: rope.and_then(|rope| rope.query_scale),
        }
    }

    /// Where the layer has KV.
    fn page(&self) -> LayerPage {
        self.places[self.layer].page()
    }

    /// The cache of a layer of each page. Layers that are all of one width are column by column one after the other, keys first. Pages
    /// of others are one after the other, first those of all keys: what a page has is its own, whichever layers it serves.
    fn layer_kv<'k>(
        kv: &'k mut [E],
        (config, kv_column): (KvConfig, usize),
        page: LayerPage,
        spec: &AttentionSpec,
    ) -> PagedKvMut<'k, E> {
        let layout = KvLayout {
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            block_size: page.slice_size,
        };
        let own = kv_column * config.block_size.tokens();
        let (k, v, stride) = if config.groups.has_wide_layers() {
            let (k, v) = kv.split_at_mut(kv.len() / 2);
            let start = (page.column * own).min(k.len());
            (
                &mut k[start..],
                &mut v[start..],
                config.groups.columns_per_page() * own,
            )
        } else {
            let elements = layout.elements(config.num_pages);
            let (k, v) =
                kv[2 * page.column * elements..2 * (page.column + 1) * elements].split_at_mut(elements);
            (k, v, own)
        };
        PagedKvMut { k, v, layout, stride }
    }
}

impl<E: KvElement> Operations<Arc<Linear>, Vec<f32>> for Step<'_, '_, E> {
    type Error = StepError;

    fn make_layer_inputs(
        &mut self,
        projection: &Arc<Linear>,
        norm: &Vec<f32>,
        eps: f32,
    ) -> Result<(), StepError> {
        self.project_layer_inputs(projection, norm, eps)?;
        Ok(())
    }

    fn begin_layer(&mut self, index: usize) {
        self.layer = index;
    }

    fn project(
        &mut self,
        norms: &Norms<'_, Vec<f32>>,
        linear: &Arc<Linear>,
        width: usize,
    ) -> Result<(), StepError> {
        self.add_norm(norms);
        let (x, out) = (self.rows * linear.inputs(), self.rows * width);
        linear.forward_to_wider(&self.act.normed[..x], &mut self.act.qkv[..out], self.arena)?;
        Ok(())
    }

    fn write_kv(
        &mut self,
        layer: &LayerSpec,
        spec: &AttentionSpec,
        qk_norm: Option<&[Vec<f32>; 2]>,
    ) -> Result<(), StepError> {
        let page = self.page();
        let eps = layer.norm.eps;
        let norm = qk_norm.map(|[q, k]| QkNorm { q, k, eps });
        let values = match spec.values {
            Values::Projected => CachedValues::Projected,
            Values::Normalised => CachedValues::Normalised(eps),
            Values::NormalisedKeys => CachedValues::NormalisedKeys(eps),
        };
        qk_norm_rope_kv_write(
            &self.act.qkv[..self.rows * spec.qkv_size()],
            norm,
            self.rotation(spec),
            values,
            &self.batch.tables[page.table],
            &mut Self::layer_kv(self.kv, (self.kv_config, self.kv_column), page, spec),
            &mut self.act.q[..self.rows * spec.q_size()],
        );
        Ok(())
    }

    fn rotate_queries(
        &mut self,
        layer: &LayerSpec,
        spec: &AttentionSpec,
        q_norm: Option<&Vec<f32>>,
    ) -> Result<(), StepError> {
        rotate_queries(
            &self.act.qkv[..self.rows * spec.qkv_size()],
            spec.head_dim,
            q_norm.map(|weight| (weight.as_slice(), layer.norm.eps)),
            self.rotation(spec),
            &self.batch.tables[self.page().table],
            &mut self.act.q[..self.rows * spec.q_size()],
        );
        Ok(())
    }

    fn attend(&mut self, spec: &AttentionSpec, sinks: Option<&Vec<f32>>) -> Result<(), StepError> {
        let options = AttentionOptions {
            scale: spec.scale,
            window: spec.window,
            soft_cap: spec.soft_cap,
            sinks: sinks.map(Vec::as_slice),
            sees: match &self.batch.ends {
                None => Sees::Past,
                Some(ends) => Sees::UpTo(ends),
            },
        };
        let page = self.page();
        let len = self.rows * spec.q_size();
        let kv = Self::layer_kv(self.kv, (self.kv_config, self.kv_column), page, spec);
        let out = &mut self.act.attended[..len];
        attention(
            &self.act.q[..len],
            kv.as_ref(),
            &self.batch.tables[page.table],
            options,
            out,
            self.arena,
        )?;
        if spec.gated {
            let gates = &self.act.qkv[..self.rows * spec.qkv_size()];
            sigmoid_gate(
                &mut self.act.attended[..len],
                spec.q_size(),
                gates,
                spec.qkv_size(),
                spec.q_size(),
            );
        }
        Ok(())
    }

    fn apply_delta_rule(
        &mut self,
        layer: &LayerSpec,
        spec: &DeltaNetSpec,
        rule: &DeltaRule<Vec<f32>>,
    ) -> Result<(), StepError> {
        let LayerPlace::State(index) = self.places[self.layer] else {
            unreachable!("a layer with a recurrence has states");
        };
        let (layout, runs) = (&spec.layout, &self.batch.states);
        let [conv, heads] = &mut self.states[index];
        let x = &mut self.act.qkv[..self.rows * layout.width()];
        causal_conv(layout, &rule.conv, runs, conv, x);
        gated_delta_rule(
            layout,
            DeltaGates {
                a_log: &rule.a_log,
                dt_bias: &rule.dt_bias,
                norm: &rule.norm,
                eps: layer.norm.eps,
            },
            runs,
            x,
            heads,
            &mut self.act.attended[..self.rows * layout.values()],
        );
        Ok(())
    }

    fn rows_given(&self) -> usize {
        self.given.len()
    }

    fn keep_given(&mut self, attended: usize) -> Result<(), StepError> {
        let width = self.act.hidden.len() / self.rows;
        keep_rows(self.act.hidden, width, self.given);
        keep_rows(self.act.attended, attended, self.given);
        keep_rows(
            self.act.layer_inputs,
            self.act.layer_inputs.len() / self.rows,
            self.given,
        );
        self.rows = self.given.len();
        Ok(())
    }

    fn project_output(&mut self, output: &Arc<Linear>) -> Result<(), StepError> {
        let (x, out) = (self.rows * output.inputs(), self.rows * output.outputs());
        output.forward(&self.act.attended[..x], &mut self.act.delta[..out], self.arena)?;
        Ok(())
    }

    fn project_gated(
        &mut self,
        mlp: &DenseMlpSpec,
        norms: &Norms<'_, Vec<f32>>,
        gate_up: &Arc<Linear>,
    ) -> Result<(), StepError> {
        self.add_norm(norms);
        let (x, out) = (self.rows * gate_up.inputs(), self.rows * gate_up.outputs());
        gate_up.forward(&self.act.normed[..x], &mut self.act.gate_up[..out], self.arena)?;
        let inner = mlp.intermediate_size;
        let activated = &mut self.act.activated[..self.rows * inner];
        glu(mlp.activation, &self.act.gate_up[..out], inner, activated);
        Ok(())
    }

    fn project_down(&mut self, _: &DenseMlpSpec, down: &Arc<Linear>) -> Result<(), StepError> {
        let (x, out) = (self.rows * down.inputs(), self.rows * down.outputs());
        down.forward(&self.act.activated[..x], &mut self.act.delta[..out], self.arena)?;
        Ok(())
    }

    fn sum_ranks(&mut self) -> Result<(), StepError> {
        let len = self.rows * (self.act.hidden.len() / self.batch.tokens.len());
        match &mut self.exchange {
            None => Ok(()),
            Some(exchange) => exchange.sum(&mut self.act.delta[..len]),
        }
    }

    fn experts(
        &mut self,
        spec: &MoeSpec,
        norms: &Norms<'_, Vec<f32>>,
        moe: &Moe<Arc<Linear>>,
    ) -> Result<(), StepError> {
        self.add_norm(norms);
        let (rows, arena) = (self.rows, self.arena);
        let len = rows * moe.router.inputs();
        let (normed, delta) = (&self.act.normed[..len], &mut self.act.delta[..len]);
        let logits = &mut self.act.router_logits[..rows * spec.experts];
        moe.router.forward(normed, logits, arena)?;
        let routes = &mut self.act.routes[..rows * spec.top_k];
        route(logits, spec.experts, Router::plain(spec.softmax), routes);
        count_routes(self.expert_loads, self.layer, routes);
        let weights = ExpertWeights {
            gate_up: &moe.gate_up,
            down: &moe.down,
        };
        let buffers = ExpertBuffers {
            gathered: self.act.gathered,
            gate_up: self.act.gate_up,
            activated: self.act.activated,
            out: self.act.projected,
        };
        experts(normed, routes, weights, spec.activation, buffers, delta, arena)?;
        if let (Some(spec), Some(shared)) = (&spec.shared, &moe.shared) {
            let inner = spec.intermediate_size;
            let gate_up = &mut self.act.gate_up[..rows * 2 * inner];
            let activated = &mut self.act.activated[..rows * inner];
            let (gates, out) = (
                &mut self.act.router_logits[..rows],
                &mut self.act.projected[..len],
            );
            shared.mlp.gate_up.forward(normed, gate_up, arena)?;
            glu(spec.activation, gate_up, inner, activated);
            shared.mlp.down.forward(activated, out, arena)?;
            shared.gate.forward(normed, gates, arena)?;
            add_gated(out, gates, delta);
        }
        Ok(())
    }

    fn experts_beside(
        &mut self,
        spec: &MoeSpec,
        eps: f32,
        beside: &Beside<Arc<Linear>, Vec<f32>>,
    ) -> Result<(), StepError> {
        self.add_experts(spec, eps, beside)
    }

    fn settle(&mut self, added: Option<&Vec<f32>>, eps: f32) -> Result<(), StepError> {
        let len = self.rows * (self.act.hidden.len() / self.batch.tokens.len());
        let (hidden, delta) = (&mut self.act.hidden[..len], &self.act.delta[..len]);
        match added {
            Some(weight) => add_normed(hidden, delta, weight, eps),
            None => hidden.iter_mut().zip(delta).for_each(|(to, x)| *to += x),
        }
        self.is_fresh = true;
        Ok(())
    }

    fn gate_layer_input(
        &mut self,
        spec: &PerLayerSpec,
        input: &LayerInput<Arc<Linear>, Vec<f32>>,
    ) -> Result<(), StepError> {
        self.project_gated_input(spec, input)?;
        Ok(())
    }

    fn scale(&mut self, scalar: &Vec<f32>) -> Result<(), StepError> {
        self.act.hidden.iter_mut().for_each(|value| *value *= scalar[0]);
        Ok(())
    }

    fn add_features(&mut self, layer: usize) -> Result<(), StepError> {
        self.add_features_of_images(layer);
        Ok(())
    }

    fn finish(&mut self, norms: &Norms<'_, Vec<f32>>) -> Result<(), StepError> {
        self.add_norm(norms);
        Ok(())
    }
}

/// Counts where the tokens of a layer go.
fn count_routes(loads: Option<&ExpertLoads>, layer: usize, routes: &[Route]) {
    if let Some(loads) = loads {
        let groups = routes.chunk_by(|a, b| a.expert == b.expert);
        loads.count(layer, groups.map(|group| (group[0].expert as usize, group.len())));
    }
}

/// Moves the given rows, ascending, to the front.
fn keep_rows(matrix: &mut [f32], width: usize, rows: &[usize]) {
    for (to, &from) in rows.iter().enumerate() {
        matrix.copy_within(from * width..(from + 1) * width, to * width);
    }
}
