//! The layers of a network in words.

use plimsoll_model::rope::RopeScaling;
use plimsoll_model::{AttentionSpec, DecoderSpec, DeltaLayout, DeltaNetSpec, Mixer, Projections, Values};

/// Each kind of layer: how many there are, from which on, and what sets it apart.
pub fn summary(spec: &DecoderSpec) -> String {
    let mut kinds: Vec<(usize, usize, String)> = Vec::new();
    for (index, layer) in spec.layers.iter().enumerate() {
        let text = match &layer.mixer {
            Mixer::Attention(attention) => attention_summary(attention),
            Mixer::DeltaNet(delta_net) => delta_net_summary(delta_net),
        };
        match kinds.iter_mut().find(|(.., known)| *known == text) {
            Some((count, ..)) => *count += 1,
            None => kinds.push((1, index, text)),
        }
    }
    let kind = |(count, first, text): &(usize, usize, String)| format!("{count} from {first}: {text}");
    kinds.iter().map(kind).collect::<Vec<_>>().join("; ")
}

fn delta_net_summary(delta_net: &DeltaNetSpec) -> String {
    let DeltaNetSpec {
        layout,
        projections,
        gates,
    } = delta_net;
    assert_eq!(gates, projections);
    let DeltaLayout {
        key_heads,
        value_heads,
        adjacent,
        key_dim,
        value_dim,
        taps,
    } = layout;
    assert_eq!(*adjacent, value_heads / key_heads);
    format!("delta net {key_heads} x {key_dim}, {value_heads} x {value_dim}, {taps} taps, {projections:?}")
}

fn attention_summary(attention: &AttentionSpec) -> String {
    let AttentionSpec {
        heads,
        kv_heads,
        head_dim,
        ..
    } = attention;
    let mut parts = vec![format!("{heads}/{kv_heads} x {head_dim}")];
    parts.extend(attention.window.map(|window| format!("window {window}")));
    parts.push(match attention.rope.as_deref() {
        None => "no positions".to_owned(),
        Some(rope) => {
            let rotated = match rope.rotary_dim {
                all if all == *head_dim => String::new(),
                part => format!(" of {part}"),
            };
            let scaling = match &rope.scaling {
                RopeScaling::None => String::new(),
                RopeScaling::Linear { factor } => format!(" linear {factor}"),
                RopeScaling::Proportional { pairs, factor } => {
                    format!(" proportional {pairs} pairs / {factor}")
                }
                RopeScaling::Llama3 { factor, .. } => format!(" llama3 {factor}"),
                RopeScaling::Yarn {
                    factor,
                    attention_factor,
                    ..
                } => format!(" yarn {factor} x {attention_factor:.4}"),
                RopeScaling::LongRope {
                    original_context,
                    attention_factor,
                    ..
                } => {
                    format!(" longrope from {original_context} x {attention_factor:.4}")
                }
            };
            format!("theta {}{scaling}{rotated}", rope.theta)
        }
    });
    let query_scale = attention.rope.as_deref().and_then(|rope| rope.query_scale);
    parts.extend(query_scale.map(|scale| format!("queries {} per {}", scale.beta, scale.original)));
    if attention.scale != (*head_dim as f32).sqrt().recip() {
        parts.push(format!("scale 1/{:.4}", attention.scale.recip()));
    }
    parts.extend(attention.soft_cap.map(|cap| format!("soft cap {cap}")));
    match attention.values {
        Values::Projected => {}
        Values::Normalised => parts.push("v norm".to_owned()),
        Values::NormalisedKeys => parts.push("v = k norm".to_owned()),
    }
    parts.extend(attention.shares_kv.map(|of| format!("kv of {of}")));
    for (is, name) in [
        (attention.qk_norm, "qk norm"),
        (attention.qkv_bias, "qkv bias"),
        (attention.gated, "gated"),
        (attention.projections == Projections::Fused, "fused"),
    ] {
        if is {
            parts.push(name.to_owned());
        }
    }
    parts.join(", ")
}
