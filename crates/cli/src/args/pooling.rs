//! What a model is served for: text, or embeddings and how they are made.

use clap::{Args, ValueEnum};
use plimsoll_core::{Matryoshka, Pooling};
use plimsoll_model::{ServeAs, Task};
use serde::Deserialize;

use crate::args::values::json;

/// Text or embeddings.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Embeddings")]
pub struct PoolingArgs {
    /// Task of the model: generate (text), pooling (embeddings), or auto (embeddings if its files say that it
    /// is made for them: sentence-transformers' modules.json, GGUF's pooling_type, an architecture without a head)
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "RUNNER",
        hide_possible_values = true
    )]
    pub runner: RunnerKind,
    /// How embeddings are made, instead of what the model says: JSON with pooling_type (LAST or MEAN) and normalize (true or
    /// false)
    #[arg(long, value_name = "JSON", visible_alias = "override-pooler-config", value_parser = json::<PoolerConfig>)]
    pub pooler_config: Option<PoolerConfig>,
    /// What the model's config.json leaves out, as JSON: is_matryoshka (true if vectors may be cut by `dimensions`), or
    /// matryoshka_dimensions (the sizes to which they may be cut)
    #[arg(long, value_name = "JSON", value_parser = json::<HfOverrides>)]
    pub hf_overrides: Option<HfOverrides>,
}

impl PoolingArgs {
    /// As the model is loaded.
    pub fn serve_as(&self) -> ServeAs {
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
        }
    }

    /// Sizes to which vectors may be cut, of a model that says `own` of itself.
    pub fn matryoshka(&self, own: Matryoshka) -> Matryoshka {
        match &self.hf_overrides {
            Some(HfOverrides {
                is_matryoshka,
                matryoshka_dimensions,
            }) => Matryoshka::new(*is_matryoshka, matryoshka_dimensions.clone()),
            None => own,
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

/// `--hf-overrides`: the fields of config.json that may be overridden.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HfOverrides {
    is_matryoshka: Option<bool>,
    matryoshka_dimensions: Option<Vec<usize>>,
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
        let sizes = json::<HfOverrides>(r#"{"matryoshka_dimensions": [64, 128]}"#).unwrap();
        assert_eq!(sizes.matryoshka_dimensions, Some(vec![64, 128]));
        assert!(json::<HfOverrides>(r#"{"rope_theta": 1.0}"#).is_err());
    }
}
