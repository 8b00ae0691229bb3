//! What the decoder can and no family of dense models has, against a naive one.

use plimsoll_core::{
    BlockSize, GroupTable, PageId, RequestId, Run, RunInput, Scratch, StateConfig, StepLimits, StepPlan,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::HfOverrides;
use crate::spec::{AttentionSpec, LayerSpec};

const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "rope_theta": 100.0}"#;

/// Llama with sinks in all layers, and windows and soft caps in some.
fn config() -> ModelConfig {
    let mut config =
        ModelConfig::from_json(Path::new("config.json"), CONFIG, &HfOverrides::default()).unwrap();
    for (index, layer) in config.spec.layers.iter_mut().enumerate() {
        let attention = Arc::make_mut(layer).attention_mut();
        attention.sinks = true;
        attention.window = (index % 2 == 0).then_some(7);
        attention.soft_cap = (index >= 2).then_some(0.8);
    }
    config.spec.logit_soft_cap = Some(1.5);
    config
}

/// Weights, and the network in f64 by its definition.
struct Naive<'a> {
    spec: &'a DecoderSpec,
    weights: DummyWeights,
}

impl Naive<'_> {
    fn tensor(&self, name: &str, shape: &[usize]) -> Vec<f64> {
        let tensor = self.weights.tensor(name, shape).unwrap().unwrap();
        tensor.widen().unwrap().into_iter().map(f64::from).collect()
    }

    fn linear(&self, name: &str, x: &[f64], outputs: usize) -> Vec<f64> {
        let weight = self.tensor(&format!("{name}.weight"), &[outputs, x.len()]);
        let dot = |row: &[f64]| row.iter().zip(x).map(|(w, x)| w * x).sum();
        weight.chunks_exact(x.len()).map(dot).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = self.tensor(&format!("{name}.weight"), &[x.len()]);
        let eps = f64::from(self.spec.final_norm.eps);
        let scale = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + eps)
            .sqrt()
            .recip();
        x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
    }

    /// Logits of every token.
    fn forward(&self, tokens: &[TokenId]) -> Vec<f64> {
        let (vocab, width) = (self.spec.vocab_size, self.spec.hidden_size);
        let table = self.tensor("model.embed_tokens.weight", &[vocab, width]);
        let row = |&token: &TokenId| table[token as usize * width..][..width].to_vec();
        let mut rows: Vec<Vec<f64>> = tokens.iter().map(row).collect();
        for (index, layer) in self.spec.layers.iter().enumerate() {
            self.layer(&format!("model.layers.{index}"), layer, &mut rows);
        }
        let logits = rows.iter().flat_map(|row| {
            let logits = self.linear("lm_head", &self.norm("model.norm", row), vocab);
            logits
                .into_iter()
                .map(|logit| capped(logit, self.spec.logit_soft_cap))
        });
        logits.collect()
    }

    fn layer(&self, name: &str, layer: &LayerSpec, rows: &mut [Vec<f64>]) {
        let spec = layer.attention().unwrap();
        let own = |part: &str| format!("{name}.self_attn.{part}");
        let sinks = self.tensor(&own("sinks"), &[spec.heads]);
        let (mut keys, mut values): (Vec<Vec<f64>>, Vec<Vec<f64>>) = (vec![], vec![]);
        for (position, row) in rows.iter_mut().enumerate() {
            let x = self.norm(&format!("{name}.input_layernorm"), row);
            let turned = |part, size| rotated(spec, self.linear(&own(part), &x, size), position);
            let q = turned("q_proj", spec.q_size());
            keys.push(turned("k_proj", spec.kv_size()));
            values.push(self.linear(&own("v_proj"), &x, spec.kv_size()));
            let heads =
                (0..spec.heads).flat_map(|head| attended(spec, head, sinks[head], &q, &keys, &values));
            let output = self.linear(&own("o_proj"), &heads.collect::<Vec<_>>(), row.len());
            row.iter_mut().zip(output).for_each(|(x, y)| *x += y);

            let x = self.norm(&format!("{name}.post_attention_layernorm"), row);
            let inner = layer.dense_mlp().intermediate_size;
            let [gate, up] =
                ["gate", "up"].map(|part| self.linear(&format!("{name}.mlp.{part}_proj"), &x, inner));
            let silu = gate.iter().zip(up).map(|(g, up)| g / (1.0 + (-g).exp()) * up);
            let output = self.linear(
                &format!("{name}.mlp.down_proj"),
                &silu.collect::<Vec<_>>(),
                row.len(),
            );
            row.iter_mut().zip(output).for_each(|(x, y)| *x += y);
        }
    }
}

fn capped(x: f64, cap: Option<f32>) -> f64 {
    cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh())
}

fn rotated(spec: &AttentionSpec, mut heads: Vec<f64>, position: usize) -> Vec<f64> {
    let (dim, theta) = (spec.head_dim, spec.rope.as_ref().unwrap().theta);
    for head in heads.chunks_exact_mut(dim) {
        for pair in 0..dim / 2 {
            let angle = position as f64 * theta.powf(-2.0 * pair as f64 / dim as f64);
            let (a, b) = (head[pair], head[pair + dim / 2]);
            head[pair] = a * angle.cos() - b * angle.sin();
            head[pair + dim / 2] = b * angle.cos() + a * angle.sin();
        }
    }
    heads
}

/// What a head of the last token sees.
fn attended(
    spec: &AttentionSpec,
    head: usize,
    sink: f64,
    q: &[f64],
    keys: &[Vec<f64>],
    values: &[Vec<f64>],
) -> Vec<f64> {
    let dim = spec.head_dim;
    let kv_head = head / (spec.heads / spec.kv_heads) * dim..head / (spec.heads / spec.kv_heads) * dim + dim;
    let first = spec.window.map_or(0, |window| keys.len().saturating_sub(window));
    let weight = |key: &Vec<f64>| {
        let dot: f64 = key[kv_head.clone()]
            .iter()
            .zip(&q[head * dim..])
            .map(|(k, q)| k * q)
            .sum();
        capped(dot * f64::from(spec.scale), spec.soft_cap).exp()
    };
    let weights: Vec<f64> = keys[first..].iter().map(weight).collect();
    let total = weights.iter().sum::<f64>() + sink.exp();
    let mut out = vec![0.0; dim];
    for (weight, value) in weights.iter().zip(&values[first..]) {
        out.iter_mut()
            .zip(&value[kv_head.clone()])
            .for_each(|(y, v)| *y += weight / total * v);
    }
    out
}

#[test]
fn sinks_and_soft_caps_are_those_of_the_definition() {
    let seed = rand::random();
    let config = config();
    let weights = DummyWeights {
        seed,
        dtype: WeightType::F32,
        quantization: crate::quantization::Quantization::default(),
    };
    let budget = Budget::new(1 << 30);
    let mut progress = |_| ();
    let cancel = Cancel::default();
    let mut loader = Loader::new(&weights, &budget, &cancel, &mut progress);
    let decoder = Decoder::load(&config.spec, &mut loader).unwrap();
    let model = Arc::new(Model {
        about: About {
            config: config.clone(),
            generation: GenerationConfig::default(),
            scoring_row: None,
        },
        decoder,
        encoder: None,
        slowest_encode: Default::default(),
        kv_element: KvElementType::F32,
        exchange: None,
        _charges: loader.finish().unwrap(),
    });
    let state = StateConfig {
        kv: KvConfig {
            block_size: BlockSize::new(8).unwrap(),
            num_pages: 32,
            groups: config.spec.cache_groups(BlockSize::new(8).unwrap()),
            state_slots: 0,
        },
        scratch: Scratch::Growable,
        canary_bytes: 0,
    };
    let limits = StepLimits {
        max_num_batched_tokens: 64,
        max_num_seqs: 2,
        max_model_len: 64,
    };
    let mut runner = model.build_state(&state, &limits, &budget, &mut || {}).unwrap();

    let mut rng = StdRng::seed_from_u64(seed);
    let len = rng.random_range(2..60);
    let tokens: Vec<TokenId> = (0..len).map(|_| rng.random_range(0..40)).collect();
    // A chunk, then the rest, then the last token alone.
    let mut found = Vec::new();
    let cut = rng.random_range(0..len - 1);
    for (start, end) in [(0, cut), (cut, len - 1), (len - 1, len)] {
        if start == end {
            continue;
        }
        let groups = 0..config
            .spec
            .cache_groups(BlockSize::new(8).unwrap())
            .iter()
            .count() as u32;
        let run = Run {
            request: RequestId(1),
            start,
            input: RunInput::Known(tokens[start..end].to_vec()),
            images: None,
            tables: groups
                .map(|group| GroupTable::whole((group * 8..(group + 1) * 8).map(PageId).collect()))
                .collect(),
            state: None,
            sample: None,
            score: None,
            pool: None,
        };
        let plan = StepPlan {
            step: 0,
            runs: vec![run],
            encode: None,
        };
        let rows: Vec<usize> = (0..end - start).collect();
        found.extend(runner.logits(&plan, &rows).unwrap());
    }
    let expected = Naive {
        spec: &config.spec,
        weights,
    };
    let expected = expected.forward(&tokens);
    assert_eq!(found.len(), expected.len());
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*found) - expected).abs();
        assert!(
            error < 2e-5,
            "seed {seed}, {len} tokens cut at {cut}: logit {at} is {found}, not {expected}"
        );
    }
}
