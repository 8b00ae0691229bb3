//! Features that a start runs without, whatever its device: logged, and listed in the report.

use plimsoll_profiler::Disabled;
use plimsoll_server::EmbeddingInfo;

use crate::backend::ModelFacts;
use crate::settings::EngineSettings;

/// The path that a server of embeddings is without.
pub(crate) const TEXT_GENERATION: &str = "text generation";

/// What the settings and the model's task switch off.
pub(super) fn disabled(facts: &ModelFacts, settings: &EngineSettings) -> Vec<Disabled> {
    let mut disabled = Vec::new();
    let mut add = |path, reason: &str| {
        disabled.push(Disabled {
            path,
            reason: reason.to_owned(),
        });
    };
    if !settings.prefix_caching {
        let reason = "every prompt is computed from the beginning (--no-enable-prefix-caching)";
        add("prefix caching", reason);
    }
    if let Some(EmbeddingInfo {
        pooling,
        size,
        scorer,
        ..
    }) = &facts.embedding
    {
        let reason = match scorer {
            None => format!(
                "the model is served for embeddings (--runner): {} pooling, vectors of {size} numbers",
                pooling.name()
            ),
            Some(_) => "the model is a cross-encoder: it scores pairs of texts".to_owned(),
        };
        add(TEXT_GENERATION, &reason);
        if pooling.needs_every_row() && settings.prefix_caching {
            let reason = "a mean takes every token's row, so every prompt is computed from the beginning";
            add("prefix caching", reason);
        }
    }
    if !settings.plans.is_on() {
        let reason = "--no-profile-cache: this start measures, and keeps nothing for the next one";
        add("profile cache", reason);
    }
    disabled
}

#[cfg(test)]
mod tests {
    use plimsoll_core::{CacheGroups, Matryoshka, Pooling};

    use super::*;
    use crate::settings::tests::settings;

    #[test]
    fn what_settings_and_task_switch_off_is_named() {
        let paths = |pooling: Option<Pooling>, flags| {
            let facts = ModelFacts {
                vocab_size: 1,
                images: None,
                embedding: pooling.map(|pooling| EmbeddingInfo {
                    pooling,
                    normalize: true,
                    size: 1,
                    matryoshka: Matryoshka::No,
                    scorer: None,
                }),
                groups: CacheGroups::default(),
                kv_bytes_per_token: 1,
                state_bytes: 0,
                quantization: None,
                num_parameters: None,
                num_active_parameters: None,
                num_parameters_of_rank: None,
            };
            let disabled = disabled(&facts, &settings(flags));
            disabled.iter().map(|disabled| disabled.path).collect::<Vec<_>>()
        };
        assert!(paths(None, "").is_empty());
        let off = "--no-enable-prefix-caching --no-profile-cache";
        assert_eq!(paths(None, off), ["prefix caching", "profile cache"]);
        assert_eq!(paths(Some(Pooling::Last), ""), [TEXT_GENERATION]);
        assert_eq!(
            paths(Some(Pooling::Mean), ""),
            [TEXT_GENERATION, "prefix caching"]
        );
        // Said once, whatever the reasons.
        assert_eq!(
            paths(Some(Pooling::Mean), off),
            ["prefix caching", TEXT_GENERATION, "profile cache"]
        );
    }
}
