//! Layers of a step of one row whose products, from a mixer's output to the next mixer's projections, are one launch, and layers that are one
//! as a whole.

use plimsoll_core::BlockSize;
use plimsoll_device::cuda::GpuError;
use plimsoll_kernels::cuda::{
    DenseLayers, GpuChain, GpuChainEnd, GpuKvElement, GpuLinear, GpuMoeChain, GpuNorm, GpuQkNorm, GpuRouter,
    GpuRowAttention, GpuRowLayer, GpuRowLayers, Linears, MoeChainLayers, RowLayerProducts, SandwichNorms,
    SumNorms,
};
use plimsoll_kernels::{ExpertActivation, KvLayout};

use super::beside::router_of;
use super::layers::{Step, norm};
use super::{Decoder, StepState};
use crate::blocks::{Attention, MlpKind, Norms};
use crate::cuda::experts::LayerExperts;
use crate::cuda::weights::{GpuLayer, GpuVector};
use crate::spec::{AttentionSpec, DenseMlpSpec, Mlp, MoeSpec, Values};

/// The products of a layer from its mixer's output on, where nothing but residual sums and norms lies between them and, with experts, their
/// choice.
pub(super) enum Chain<'a> {
    /// Of the mixer, gate and up, down.
    Dense(&'a DenseMlpSpec, [&'a GpuLinear; 3]),
    /// Of the mixer, the router, the experts and what is beside them.
    Experts(Box<ExpertChain<'a>>),
}

/// See [`Chain::Experts`].
pub(super) struct ExpertChain<'a> {
    spec: &'a MoeSpec,
    layers: MoeChainLayers<'a>,
    router: GpuRouter<'a>,
    /// Of a layer with an MLP beside the experts.
    sandwich: Option<SandwichNorms<'a>>,
}

/// See [`Chain::Dense`]; what is added may have norms.
pub(super) fn dense_chain_of(layer: &GpuLayer) -> Option<(&DenseMlpSpec, [&GpuLinear; 3])> {
    let (Mlp::Dense(spec), MlpKind::Dense(mlp)) = (&layer.spec.mlp, &layer.mlp.kind) else {
        return None;
    };
    let has_norms = layer.spec.post_norms && layer.input.is_none();
    (is_plain(layer) || has_norms).then_some((spec, [layer.mixer.output(), &mlp.gate_up, &mlp.down]))
}

/// A layer that can be a part of a launch as a whole.
pub(super) struct WholeLayer<'a> {
    pub(super) spec: &'a AttentionSpec,
    pub(super) attention: &'a Attention<GpuLinear, GpuVector>,
    pub(super) mlp: &'a DenseMlpSpec,
    pub(super) products: RowLayerProducts<'a>,
}

impl<'a> WholeLayer<'a> {
    /// If its attention is as [`GpuRowAttention`] has it.
    pub(super) fn of(layer: &'a GpuLayer) -> Option<Self> {
        let (mlp, [output, gate_up, down]) = dense_chain_of(layer)?;
        let (spec, attention) = (layer.spec.attention()?, layer.mixer.attention()?);
        let rope = spec.rope.as_deref()?;
        let is_plain = is_plain(layer)
            && spec.window.is_none()
            && (rope.rotary_dim, rope.query_scale, rope.sections) == (spec.head_dim, None, None)
            && spec.values == Values::Projected
            && spec.shares_kv.is_none()
            && spec.soft_cap.is_none()
            && !spec.sinks
            && !spec.gated;
        is_plain.then_some(Self {
            spec,
            attention,
            mlp,
            products: RowLayerProducts {
                projections: &attention.qkv,
                output,
                gate_up,
                down,
            },
        })
    }

    pub(super) fn layout(&self, block_size: BlockSize) -> KvLayout {
        KvLayout {
            kv_heads: self.spec.kv_heads,
            head_dim: self.spec.head_dim,
            block_size,
        }
    }
}

/// See [`Chain::Experts`].
fn expert_chain_of<'a>(layer: &'a GpuLayer, own: &'a LayerExperts) -> Option<ExpertChain<'a>> {
    let (spec, router, dense, sandwich) = match (&layer.spec.mlp, &layer.mlp.kind) {
        (Mlp::Moe(spec), MlpKind::Moe(moe)) if is_plain(layer) => {
            let activation = spec.shared.as_ref().map(|shared| shared.activation);
            let shared = moe.shared.as_ref().map(|shared| DenseLayers {
                gate_up: &shared.mlp.gate_up,
                down: &shared.mlp.down,
                gate: Some(&shared.gate),
            });
            let router = GpuRouter::plain(moe.router.bias(), spec.softmax);
            (spec, router, activation.zip(shared), None)
        }
        (Mlp::Both(mlp, spec), MlpKind::Both(dense, beside)) if layer.input.is_none() => {
            let norms = SandwichNorms {
                mixer_sum: layer.mixer.post_norm()?.slice(),
                router: beside.router_norm.slice(),
                experts: beside.norm.slice(),
                mlp_sum: beside.post_norms[0].slice(),
                expert_sum: beside.post_norms[1].slice(),
                sum: layer.mlp.post_norm.as_ref()?.slice(),
                scalar: layer.scalar.as_ref()?.slice(),
            };
            let dense = DenseLayers {
                gate_up: &dense.gate_up,
                down: &dense.down,
                gate: None,
            };
            let router = router_of(beside, spec);
            (spec, router, Some((mlp.activation, dense)), Some(norms))
        }
        _ => return None,
    };
    let are_alike = dense.is_none_or(|(activation, _)| spec.activation == ExpertActivation::Glu(activation));
    let layers = MoeChainLayers {
        output: layer.mixer.output(),
        router: &own.router,
        gate_up: &own.gate_up,
        down: &own.down,
        top_k: spec.top_k,
        dense: dense.map(|(_, dense)| dense),
    };
    are_alike.then_some(ExpertChain {
        spec,
        layers,
        router,
        sandwich,
    })
}

fn is_plain(layer: &GpuLayer) -> bool {
    !layer.spec.post_norms && !layer.spec.scalar && layer.input.is_none()
}

impl Decoder {
    fn chain_of(&self, index: usize) -> Option<Chain<'_>> {
        let layer = &self.weights.decoder.layers[index];
        if let MlpKind::Dense(_) = &layer.mlp.kind {
            return dense_chain_of(layer).map(|(spec, products)| Chain::Dense(spec, products));
        }
        let experts = self.experts.as_ref()?.layer(index);
        expert_chain_of(layer, experts).map(|chain| Chain::Experts(Box::new(chain)))
    }

    /// Whether the products of this layer are one launch in a step of so many rows.
    pub(super) fn chains(&self, index: usize, rows: usize) -> bool {
        if rows != 1 || self.all_reduce().is_some() {
            return false;
        }
        match (self.chain_of(index), &self.experts) {
            (Some(Chain::Dense(_, products)), _) => {
                let spec = &self.weights.decoder.layers[index].spec;
                self.linears.chains(products, spec.post_norms)
            }
            (Some(Chain::Experts(of)), Some(experts)) => experts.kernels.can_chain(&of.layers, None),
            _ => false,
        }
    }

    /// Whether layers like this one are one launch as a whole in a decode step of one row.
    pub(super) fn chains_whole(&self, index: usize, state: &StepState) -> bool {
        let layer = WholeLayer::of(&self.weights.decoder.layers[index]);
        let Some(layer) = layer.filter(|_| self.all_reduce().is_none()) else {
            return false;
        };
        let layout = layer.layout(state.places[index].page().slice_size);
        state.kv_element == GpuKvElement::Bf16
            && self
                .linears
                .chains_layer(&layer.products, layer.spec.heads, &layout)
    }

    /// Tokens of context up to which layers are fastest as a whole, if some are one launch so: longer ones take a graph of their own.
    pub(in crate::cuda) fn longest_whole(&self, state: &StepState) -> Option<usize> {
        let whole = self
            .kinds
            .iter()
            .filter(|&&first| self.chains_whole(first, state));
        let heads =
            whole.filter_map(|&first| Some(self.weights.decoder.layers[first].spec.attention()?.heads));
        heads.map(|heads| self.linears.longest_row_context(heads)).min()
    }
}

impl Step<'_, '_> {
    /// Whether the whole layer is a part of a launch: what it attends to is written nowhere then.
    pub(super) fn chains_whole(&self) -> bool {
        self.kind().chains_whole && self.can_chain_whole()
    }

    /// Whether the step is one where layers can be: all its rows decode and are given out.
    fn can_chain_whole(&self) -> bool {
        let input = self.input;
        !input.is_long
            && self.images.is_none()
            && input.decode.is_some()
            && input.sample_at.is_none()
            && input.samples > 0
    }

    /// Launches the layers that wait, and with them these projections of what follows, if they can be a part of it; or lets them wait on,
    /// if the layer that follows can be one launch with them. Returns whether the projections were, or will be, computed.
    pub(super) fn launch_chain(
        &mut self,
        next: Option<(&Norms<'_, GpuVector>, &GpuLinear)>,
    ) -> Result<bool, GpuError> {
        let Some(&index) = self.chain.first() else {
            return Ok(false);
        };
        let decoder = self.decoder;
        if self.kinds[decoder.kind_of[index]].chains_whole && self.can_chain_whole() {
            return self.launch_whole(next);
        }
        self.chain.clear();
        let layer = &decoder.weights.decoder.layers[index];
        let chain = decoder
            .chain_of(index)
            .expect("only layers with such products wait");
        let linears = &decoder.linears;
        let can_chain = |linear: &GpuLinear| match &chain {
            Chain::Dense(_, products) => linears.can_chain(*products, Some(linear)),
            Chain::Experts(of) => self.of_experts().kernels.can_chain(&of.layers, Some(linear)),
        };
        let next = next
            .filter(|(_, linear)| can_chain(linear))
            .map(|(norms, linear)| GpuChainEnd {
                norm: norm(norms),
                linear,
                out: self.rows(self.act.qkv, linear.outputs()),
            });
        let own_norm = norm(&Norms {
            added: None,
            weight: layer.mlp.norm(),
            eps: layer.spec.norm.eps,
        });
        let output = layer.mixer.output();
        let x = self.rows(self.act.attended, output.inputs());
        let hidden = self.rows(self.act.hidden, output.outputs());
        match chain {
            Chain::Dense(spec, [output, gate_up, down]) => linears.forward_chain(&GpuChain {
                x,
                output,
                hidden,
                norm: own_norm,
                gate_up,
                activation: spec.activation,
                activated: self.rows(self.act.activated, down.inputs()),
                down,
                sum_norms: match (layer.mixer.post_norm(), &layer.mlp.post_norm) {
                    (Some(mixer), Some(mlp)) => Some(SumNorms {
                        mixer: mixer.slice(),
                        mlp: mlp.slice(),
                        scalar: layer.scalar.as_ref().map(GpuVector::slice),
                        delta: self.rows(self.act.delta, output.outputs()),
                    }),
                    _ => None,
                },
                next,
            })?,
            Chain::Experts(of) => {
                let (act, spec, dense) = (self.act.experts, of.spec, of.layers.dense);
                self.of_experts().kernels.forward_chain(
                    linears,
                    &GpuMoeChain {
                        layers: of.layers,
                        x,
                        hidden,
                        norm: own_norm,
                        router: of.router,
                        logits: act.logits.range(0..spec.experts),
                        loads: self.state.loads.of(index),
                        activation: spec.activation,
                        activated: act.activated.range(0..spec.top_k * spec.intermediate_size),
                        dense_activated: dense
                            .map(|dense| self.rows(self.act.activated, dense.down.inputs())),
                        // The row's weights are known to the kernel alone, so their place has room for the logit.
                        gate_logit: dense
                            .and_then(|dense| dense.gate)
                            .map(|_| act.weights.range(0..1)),
                        sandwich: of.sandwich,
                        next,
                    },
                )?;
            }
        }
        // As the norm ahead of projections leaves it: what a mixer gives is to be added next.
        self.is_fresh = next.is_none();
        Ok(next.is_some())
    }

    /// As [`Self::launch_chain`], of whole layers.
    fn launch_whole(&mut self, next: Option<(&Norms<'_, GpuVector>, &GpuLinear)>) -> Result<bool, GpuError> {
        let (decoder, state) = (self.decoder, self.state);
        let of = |index: usize| {
            let layer = &decoder.weights.decoder.layers[index];
            let whole = WholeLayer::of(layer).expect("only such layers wait");
            (layer, whole, state.places[index].page())
        };
        let (first, page) = (self.chain[0], state.places[self.chain[0]].page());
        let is_alike = |index: usize| {
            decoder.kind_of[index] == decoder.kind_of[first] && state.places[index].page().table == page.table
        };
        if next.is_some()
            && self.chains_whole()
            && is_alike(self.layer)
            && self.chain.len() < Linears::MOST_ROW_LAYERS
        {
            return Ok(true);
        }
        let waiting = std::mem::take(&mut self.chain);
        let (layer, whole, _) = of(first);
        let (spec, eps) = (whole.spec, layer.spec.norm.eps);
        let layers = waiting.iter().map(|&index| {
            let (layer, whole, page) = of(index);
            GpuRowLayer {
                products: whole.products,
                qk_norm: whole.attention.qk_norm.as_ref().map(|[q, k]| GpuQkNorm {
                    q: q.slice(),
                    k: k.slice(),
                    eps,
                }),
                kv: state.layer_kv(page, whole.spec, decoder.weights.kv_scales[index]),
                norm: GpuNorm {
                    weight: layer.mlp.norm().slice(),
                    eps,
                },
                first_norm: GpuNorm {
                    weight: whole.attention.norm.slice(),
                    eps,
                },
            }
        });
        let layers: Vec<_> = layers.collect();
        let projected = whole.products.projections;
        let next = next
            .filter(|(norms, linear)| linear.is_like(projected) && norms.eps == eps)
            .map(|(norms, linear)| GpuChainEnd {
                norm: norm(norms),
                linear,
                out: self.rows(self.act.qkv, linear.outputs()),
            });
        let (input, inputs) = (self.input, &state.inputs);
        let decode = input.decode.as_ref().expect("of a decode step");
        let choice = self.kinds[decoder.kind_of[first]].attention.as_ref();
        decoder.linears.forward_row_layers(&GpuRowLayers {
            layers: &layers,
            attention: GpuRowAttention {
                heads: spec.heads,
                layout: whole.layout(page.slice_size),
                scale: spec.scale,
                rope: self.rope_of(choice.expect("a layer with attention"), spec),
                run: inputs.device(decode.runs[page.table]),
                blocks: inputs.device(input.blocks),
                slot: inputs.device(input.slots[page.table]),
            },
            activation: whole.mlp.activation,
            projected: self.rows(self.act.qkv, projected.outputs()),
            hidden: self.rows(self.act.hidden, whole.products.output.outputs()),
            next,
        })?;
        self.is_fresh = next.is_none();
        Ok(next.is_some())
    }
}
