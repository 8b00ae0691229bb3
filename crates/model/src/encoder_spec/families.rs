//! Families of encoders: what their parts are and how checkpoints name them.

use crate::names::{PROJECTOR, SIGLIP, TOWER, VISION_TOWER};

/// What all encoders of one family have in common.
#[derive(Debug, PartialEq)]
pub struct EncoderFamily {
    /// What people call it.
    pub name: &'static str,
    /// In front of the names of the transformer's tensors.
    pub(crate) scope: &'static str,
    /// The projection of patches, and whether it has a bias.
    pub(crate) patches: (&'static str, bool),
    /// The table of positions.
    pub(crate) positions: Option<&'static str>,
    /// The norm before the first layer.
    pub(crate) first_norm: Option<&'static str>,
    /// The list of layers.
    pub(crate) layers: &'static str,
    /// Before attention and before the MLP.
    pub(crate) norms: [&'static str; 2],
    /// Norms take the mean away and have a bias; those of others are of the root of the mean square.
    pub(crate) norms_are_centred: bool,
    /// q, k and v: one tensor or three.
    pub(crate) qkv: &'static [&'static str],
    pub(crate) output: &'static str,
    /// Gate and up, or up.
    pub(crate) up: &'static [&'static str],
    pub(crate) down: &'static str,
    /// Whether projections of the layers have a bias.
    pub(crate) has_biases: bool,
    /// How patches become rows.
    pub(crate) merger: MergerNames,
    /// Whether patches that become one row follow each other in memory; where not, they lie line by line.
    pub(crate) merged_are_together: bool,
    /// By how much of a step the frequencies of columns lie behind those of rows, where patches turn.
    pub(crate) column_shift: f64,
}

/// From patches to rows.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum MergerNames {
    /// Patches side by side are normalised and go through an MLP; `features` are such of layers before the last.
    Mlp {
        scope: &'static str,
        norm: &'static str,
        up: &'static str,
        down: &'static str,
        features: Option<&'static str>,
    },
    /// The mean of patches is normalised and projected.
    Mean {
        last_norm: &'static str,
        norm: &'static str,
        projection: &'static str,
    },
    /// Patches are normalised, elements of the same index stand together, and go through a projection and an MLP.
    Projected {
        norm: &'static str,
        merge: &'static str,
        up: &'static str,
        down: &'static str,
    },
}

/// [Qwen3-VL](https://arxiv.org/abs/2511.21631) and Qwen3.5.
pub(crate) static QWEN3: EncoderFamily = EncoderFamily {
    name: "Qwen3-VL",
    scope: TOWER,
    patches: ("patch_embed.proj", true),
    positions: Some("pos_embed.weight"),
    first_norm: None,
    layers: "blocks",
    norms: ["norm1", "norm2"],
    norms_are_centred: true,
    qkv: &["attn.qkv"],
    output: "attn.proj",
    up: &["mlp.linear_fc1"],
    down: "mlp.linear_fc2",
    has_biases: true,
    merger: MergerNames::Mlp {
        scope: "merger",
        norm: "norm",
        up: "linear_fc1",
        down: "linear_fc2",
        features: Some("deepstack_merger_list"),
    },
    merged_are_together: true,
    column_shift: 0.0,
};

/// [Qwen2.5-VL](https://arxiv.org/abs/2502.13923): windows, gated MLPs.
pub(crate) static QWEN2_5: EncoderFamily = EncoderFamily {
    name: "Qwen2.5-VL",
    scope: TOWER,
    patches: ("patch_embed.proj", false),
    positions: None,
    first_norm: None,
    layers: "blocks",
    norms: ["norm1", "norm2"],
    norms_are_centred: false,
    qkv: &["attn.qkv"],
    output: "attn.proj",
    up: &["mlp.gate_proj", "mlp.up_proj"],
    down: "mlp.down_proj",
    has_biases: true,
    merger: MergerNames::Mlp {
        scope: "merger",
        norm: "ln_q",
        up: "mlp.0",
        down: "mlp.2",
        features: None,
    },
    merged_are_together: true,
    column_shift: 0.0,
};

/// [SigLIP](https://arxiv.org/abs/2303.15343) of [Gemma 3](https://arxiv.org/abs/2503.19786).
pub(crate) static GEMMA3: EncoderFamily = EncoderFamily {
    name: "SigLIP",
    scope: SIGLIP,
    patches: ("embeddings.patch_embedding", true),
    positions: Some("embeddings.position_embedding.weight"),
    first_norm: None,
    layers: "encoder.layers",
    norms: ["layer_norm1", "layer_norm2"],
    norms_are_centred: true,
    qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    output: "self_attn.out_proj",
    up: &["mlp.fc1"],
    down: "mlp.fc2",
    has_biases: true,
    merger: MergerNames::Mean {
        last_norm: "post_layernorm",
        norm: "mm_soft_emb_norm.weight",
        projection: "mm_input_projection_weight",
    },
    merged_are_together: false,
    column_shift: 0.0,
};

/// [Pixtral](https://arxiv.org/abs/2410.07073) of Mistral 3.
pub(crate) static PIXTRAL: EncoderFamily = EncoderFamily {
    name: "Pixtral",
    scope: VISION_TOWER,
    patches: ("patch_conv", false),
    positions: None,
    first_norm: Some("ln_pre"),
    layers: "transformer.layers",
    norms: ["attention_norm", "ffn_norm"],
    norms_are_centred: false,
    qkv: &["attention.q_proj", "attention.k_proj", "attention.v_proj"],
    output: "attention.o_proj",
    up: &["feed_forward.gate_proj", "feed_forward.up_proj"],
    down: "feed_forward.down_proj",
    has_biases: false,
    merger: MergerNames::Projected {
        norm: "norm.weight",
        merge: "patch_merger.merging_layer",
        up: "linear_1",
        down: "linear_2",
    },
    merged_are_together: false,
    column_shift: 0.5,
};

/// In front of the names of what is behind a transformer that stands by itself.
pub(crate) const BEHIND: &str = PROJECTOR;
