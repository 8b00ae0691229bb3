//! What a model is served for: text, or embeddings and how they are made.

use clap::{Args, ValueEnum};
use plimsoll_core::Pooling;
use plimsoll_model::{HfOverrides, OnlineQuantization, ServeAs, Task};
use serde::Deserialize;

use crate::args::values::json;

/// Text or embeddings.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Embeddings")]
pub struct PoolingArgs {
    /// Task of the model: generate (text), pooling (embeddings, and scores of a cross-encoder), or auto (embeddings if its files say so:
    /// sentence-transformers' modules.json, GGUF's pooling_type, or an architecture without an LM head)
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "RUNNER",
        hide_possible_values = true
    )]
    pub runner: RunnerKind,
    /// Pooling of embeddings, in place of what the model's files say: JSON with pooling_type (LAST or MEAN) and normalize (true
    /// or false)
    #[arg(long, value_name = "JSON", visible_alias = "override-pooler-config", value_parser = json::<PoolerConfig>)]
    pub pooler_config: Option<PoolerConfig>,
}

impl PoolingArgs {
    /// As the model is loaded, with these fields of its config.json and this format of its linear layers.
    pub fn serve_as(&self, hf_overrides: HfOverrides, quantization: Option<OnlineQuantization>) -> ServeAs {
        let config = self.pooler_config.clone().unwrap_or_default();
        ServeAs {
            task: match self.runner {
                RunnerKind::Auto => Task::Auto,
                RunnerKind::Generate => Task::Generate,
                RunnerKind::Pooling => Task::Embed,
            },
            pooling: config.pooling_type.map(|kind| match kind {
                PoolingType::Last => Pooling::Last,
                PoolingType::Mean => Pooling::Mean,
            }),
            normalize: config.normalize,
            hf_overrides,
            quantization,
            // Known once the model's files are.
            images: None,
        }
    }
}

/// `--runner`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum RunnerKind {
    /// As the model's files say.
    #[default]
    Auto,
    /// Text.
    Generate,
    /// Embeddings.
    Pooling,
}

/// `--pooler-config`, under vLLM's names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolerConfig {
    #[serde(alias = "seq_pooling_type")]
    pooling_type: Option<PoolingType>,
    #[serde(alias = "use_activation")]
    normalize: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum PoolingType {
    #[serde(alias = "last")]
    Last,
    #[serde(alias = "mean")]
    Mean,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_vllms_names() {
        let config = json::<PoolerConfig>(r#"{"pooling_type": "MEAN", "normalize": false}"#).unwrap();
        assert_eq!(
            (config.pooling_type, config.normalize),
            (Some(PoolingType::Mean), Some(false))
        );
        let newer = json::<PoolerConfig>(r#"{"seq_pooling_type": "LAST"}"#).unwrap();
        assert_eq!(newer.pooling_type, Some(PoolingType::Last));
        for wrong in [r#"{"pooling_type": "CLS"}"#, r#"{"softmax": true}"#, "MEAN"] {
            assert!(json::<PoolerConfig>(wrong).is_err(), "{wrong}");
        }
    }
}
