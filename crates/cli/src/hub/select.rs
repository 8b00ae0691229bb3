//! Which files of a repository are needed.

use super::{HubError, RemoteFile, RepoId, Weights};

/// Small files that are taken wherever a repository has them.
const SIDE_FILES: [&str; 15] = [
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "preprocessor_config.json",
    "processor_config.json",
];

/// Ends of the names of directories that say in a config.json how embeddings and scores are made.
const MODULES: [&str; 2] = ["_Pooling/config.json", "_LogitScore/config.json"];

/// Names the shards of a model of several files.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The files of a repository that are needed, in a stable order.
pub(super) fn select(
    files: &[RemoteFile],
    repo: &RepoId,
    weights: Weights,
) -> Result<Vec<RemoteFile>, HubError> {
    let side = || {
        files.iter().filter(|file| {
            SIDE_FILES.contains(&&*file.path) || MODULES.iter().any(|end| file.path.ends_with(end))
        })
    };
    if weights == Weights::None {
        return Ok(side().cloned().collect());
    }
    let safetensors = safetensors(files);
    if weights != Weights::Gguf && repo.quant.is_none() && !safetensors.is_empty() {
        return Ok(side().chain(safetensors).cloned().collect());
    }
    let no_weights = |wanted, found: &str| HubError::NoWeights {
        repo: repo.id.clone(),
        wanted,
        found: found.to_owned(),
    };
    if weights == Weights::Safetensors {
        return Err(no_weights("safetensors weights", "see --load-format"));
    }
    let ggufs: Vec<_> = files.iter().filter(|file| file.path.ends_with(".gguf")).collect();
    let matching = ggufs
        .iter()
        .copied()
        .filter(|file| matches_quant(&file.path, repo));
    let matching: Vec<_> = matching.collect();
    let names = |files: &[&RemoteFile]| {
        let names: Vec<_> = files.iter().map(|file| &*file.path).collect();
        names.join(", ")
    };
    match matching[..] {
        [file] if is_split(&file.path) => Err(no_weights(
            "whole GGUF file",
            "split files are not supported: merge them",
        )),
        [file] => Ok(vec![file.clone()]),
        [] if ggufs.is_empty() => {
            let found = if files.iter().any(|file| file.path.ends_with(".bin")) {
                "pickled weights (*.bin) are not loaded: convert them to safetensors"
            } else {
                "name a model repository that has some"
            };
            Err(no_weights("safetensors or GGUF weights", found))
        }
        [] => Err(no_weights(
            "GGUF file of that name",
            &format!("it has {}", names(&ggufs)),
        )),
        _ => {
            let example = quant_of(&matching[0].path).to_owned();
            Err(HubError::WhichGguf {
                repo: repo.id.clone(),
                example,
                files: names(&matching),
            })
        }
    }
}

/// `model*.safetensors` (with its index) where there are any: repositories keep copies under other names.
fn safetensors(files: &[RemoteFile]) -> Vec<&RemoteFile> {
    let all: Vec<_> = files
        .iter()
        .filter(|f| f.path.ends_with(".safetensors") && !f.path.contains('/'))
        .collect();
    let named = all.iter().copied().filter(|f| f.path.starts_with("model"));
    let named: Vec<_> = named.collect();
    let chosen = if named.is_empty() { all } else { named };
    let index = files.iter().filter(|f| f.path == INDEX && !chosen.is_empty());
    index.chain(chosen.iter().copied()).collect()
}

/// What the name of a GGUF file ends with, which is usually its quantisation.
pub(super) fn quant_of(path: &str) -> &str {
    let stem = stem_of(path);
    stem.rsplit(['.', '-']).next().unwrap_or(stem)
}

/// The name of a GGUF file without its end.
pub(super) fn stem_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path).trim_end_matches(".gguf")
}

pub(super) fn matches_quant(path: &str, repo: &RepoId) -> bool {
    let stem = stem_of(path).to_ascii_lowercase();
    repo.quant.as_ref().is_none_or(|quant| {
        let quant = quant.to_ascii_lowercase();
        // Whole words: Q4_K must not match Q4_K_M.
        stem == quant || stem.split(['.', '-']).any(|word| word == quant)
    })
}

fn is_split(path: &str) -> bool {
    path.trim_end_matches(".gguf")
        .rsplit_once("-of-")
        .is_some_and(|(_, n)| n.chars().all(|c| c.is_ascii_digit()))
}

/// `path` as a pattern that matches nothing else.
pub(super) fn glob_escape(path: &str) -> String {
    path.chars()
        .map(|c| {
            if "[]{}*?\\!".contains(c) {
                format!("[{c}]")
            } else {
                c.to_string()
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<RemoteFile> {
        let file = |&name: &&str| RemoteFile {
            path: name.to_owned(),
            size: 1,
        };
        names.iter().map(file).collect()
    }

    fn selected(names: &[&str], repo: &str, weights: Weights) -> Result<Vec<String>, String> {
        let repo = RepoId::parse(repo).unwrap();
        let chosen = select(&files(names), &repo, weights).map_err(|e| e.to_string())?;
        Ok(chosen.into_iter().map(|file| file.path).collect())
    }

    #[test]
    fn only_what_is_needed() {
        let llama = [
            ".gitattributes",
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "generation_config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            INDEX,
            "original/consolidated.00.pth",
            "pytorch_model.bin",
            "tokenizer.json",
        ];
        let side = ["config.json", "generation_config.json", "tokenizer.json"];
        let [first, second] = [llama[5], llama[6]];
        let chosen = selected(&llama, "a/b", Weights::Any).unwrap();
        assert_eq!(chosen, [&side[..], &[INDEX, first, second]].concat());
        assert_eq!(selected(&llama, "a/b", Weights::None).unwrap(), side);
        let embedder = [
            "1_Pooling/config.json",
            "2_Normalize/config.json",
            "model.safetensors",
            "modules.json",
        ];
        let chosen = selected(&embedder, "a/b", Weights::None).unwrap();
        assert_eq!(chosen, ["1_Pooling/config.json", "modules.json"]);
        let modelopt = ["config.json", "hf_quant_config.json"];
        assert_eq!(selected(&modelopt, "a/b", Weights::None).unwrap(), modelopt);
        let chosen = selected(&["x.safetensors"], "a/b", Weights::Any).unwrap();
        assert_eq!(chosen, ["x.safetensors"]);
        let refused = |name, weights| selected(&[name], "a/b", weights).unwrap_err();
        assert!(refused("pytorch_model.bin", Weights::Any).contains("convert"));
        assert!(refused("a.gguf", Weights::Safetensors).contains("--load-format"));
    }

    #[test]
    fn one_gguf_file() {
        let names = ["M-Q4_K.gguf", "M-Q4_K_M.gguf", "M.Q8_0.gguf", "README.md"];
        let split = ["x-00001-of-00003.gguf"];
        for (names, repo, weights, expected) in [
            (&names[..], "a/b:q4_k", Weights::Any, "M-Q4_K.gguf"),
            (&names, "a/b:Q8_0", Weights::Gguf, "M.Q8_0.gguf"),
            (&["only.gguf"], "a/b", Weights::Any, "only.gguf"),
        ] {
            assert_eq!(selected(names, repo, weights).unwrap(), [expected]);
        }
        for (names, repo, expected) in [
            (&names[..], "a/b", "such as a/b:Q4_K."),
            (&names, "a/b:Q2_K", "M.Q8_0.gguf"),
            (&split, "a/b", "merge"),
        ] {
            let error = selected(names, repo, Weights::Any).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn patterns_mean_themselves() {
        assert_eq!(glob_escape("a[1]*.json"), "a[[]1[]][*].json");
    }
}
