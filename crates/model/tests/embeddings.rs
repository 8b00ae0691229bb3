//! Models that are served for embeddings: vectors against transformers, alone and among others, whole and in chunks.

use std::path::Path;
use std::sync::Arc;

use crate::common::convert::golden_gguf;
use crate::common::embeddings::*;
use crate::common::*;
use plimsoll_core::{Executor, MetaValue, Pooling, StepLimits, TokenId};
use plimsoll_device::Budget;
use plimsoll_model::{
    EmbeddingConfig, GgufFile, GgufTensors, HfOverrides, KvCacheDtype, LoadOptions, Model, ModelConfig,
    ModelError, OutputHead, ServeAs, Task,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

fn load_as(path: &Path, serve_as: ServeAs, budget: &Budget) -> Result<Arc<Model>, ModelError> {
    let options = LoadOptions {
        kv_cache_dtype: KvCacheDtype::F32,
        serve_as,
        ..Default::default()
    };
    Model::load(path, options, budget, &mut |_| ())
}

fn embedder(name: &str, pooling: Pooling) -> Arc<Model> {
    load_as(&golden_path(name), serve_as(pooling), &budget()).unwrap()
}

#[test]
fn vectors_equal_transformers() {
    for name in VECTOR_MODELS.into_iter().chain([EMBEDDER]) {
        for pooling in POOLINGS {
            let model = embedder(name, pooling);
            for case in golden_vectors(name) {
                let mut runner = runner(&model, 16, 8);
                let found = vector(&mut runner, &case.prompt, pooling, &[], [&[], &[]]);
                let error = relative_error(&found, case.expected(pooling));
                assert!(error < 1e-5, "{name}, {pooling:?}: relative error {error:e}");
            }
        }
    }
}

/// To the bit: rows do not depend on scheduling, and their sum is exact enough that its rounding does not either.
#[test]
fn vectors_do_not_depend_on_scheduling() {
    for (seed, name) in VECTOR_MODELS.into_iter().chain([EMBEDDER]).enumerate() {
        for pooling in POOLINGS {
            let model = embedder(name, pooling);
            let mut rng = StdRng::seed_from_u64(seed as u64);
            let vocab = model.spec().vocab_size as u32;
            let mut tokens =
                |len: usize| -> Vec<TokenId> { (0..len).map(|_| rng.random_range(0..vocab)).collect() };
            let prompt = tokens(75);
            let others = [tokens(9), tokens(30)];
            let [before, behind] = [
                pooled_run(2, &others[0], (0, 9), &blocks(8..10), pooling),
                pooled_run(3, &others[1], (0, 17), &blocks(10..14), pooling),
            ];
            let alone = vector(&mut runner(&model, 16, 8), &prompt, pooling, &[], [&[], &[]]);
            for cuts in [vec![], vec![1], vec![74], vec![16, 17, 40], (1..75).collect()] {
                let mut runner = runner(&model, 16, 16);
                let among = [&[before.clone()][..], &[behind.clone()][..]];
                let found = vector(&mut runner, &prompt, pooling, &cuts, among);
                assert!(found == alone, "{name}, {pooling:?}, cut at {cuts:?}");
            }
        }
    }
}

#[test]
fn texts_and_vectors_are_not_mixed_up() {
    let failure = |model: &Arc<Model>, sampled: bool, pool| {
        let mut run = run(1, 0, &[5, 6], &blocks(0..1));
        run.pool = pool;
        run.sample = sampled.then(|| greedy_spec(0));
        let mut runner = runner(model, 16, 8);
        runner.execute(&plan(vec![run])).unwrap_err().to_string()
    };
    let embedder = embedder("llama", Pooling::Last);
    assert!(failure(&embedder, true, None).contains("served for embeddings"));
    assert!(failure(&embedder, false, Some(Pooling::Mean)).contains("not served"));
    let generator = load("llama", KvCacheDtype::Auto);
    assert!(failure(&generator, false, Some(Pooling::Last)).contains("not served"));
    let step = plan(vec![run(1, 0, &[5], &blocks(0..1))]);
    assert!(runner(&embedder, 16, 8).logits(&step, &[0]).is_err());
}

#[test]
fn a_head_that_nobody_needs_takes_no_memory() {
    let bytes = |serve_as| {
        let budget = Budget::new(1 << 26);
        let _model = load_as(&golden_path("llama"), serve_as, &budget).unwrap();
        budget.meters().reserved
    };
    let head = 160 * 64 * 4;
    let saved = bytes(ServeAs::default()) - bytes(serve_as(Pooling::Last));
    assert!((head..head + 4096).contains(&saved), "{saved} of {head} bytes");
}

/// A copy of the embedding model whose files the test changes.
struct Copy(TempDir);

impl Copy {
    fn new() -> Self {
        let copy = Self(TempDir::new().unwrap());
        std::fs::create_dir(copy.0.path().join("1_Pooling")).unwrap();
        for file in ["config.json", "modules.json", "1_Pooling/config.json"] {
            std::fs::copy(golden_path(EMBEDDER).join(file), copy.0.path().join(file)).unwrap();
        }
        copy
    }

    fn edit(self, file: &str, edit: impl FnOnce(&mut Value)) -> Self {
        let path = self.0.path().join(file);
        let text = std::fs::read_to_string(&path).unwrap_or("{}".to_owned());
        let mut value = serde_json::from_str(&text).unwrap();
        edit(&mut value);
        std::fs::write(path, value.to_string()).unwrap();
        self
    }

    fn read(self, task: Task) -> Result<ModelConfig, String> {
        let serve_as = ServeAs {
            task,
            ..ServeAs::default()
        };
        ModelConfig::read(self.0.path(), &serve_as).map_err(|error| error.to_string())
    }
}

const POOLING: &str = "1_Pooling/config.json";

#[test]
fn sentence_transformers_files_say_how_vectors_are_made() {
    let found = |copy: Copy| copy.read(Task::Auto).unwrap().embedding;
    let last = EmbeddingConfig::default();
    assert_eq!(found(Copy::new()), Some(last.clone()));
    let mean = found(Copy::new().edit(POOLING, |pooling| {
        pooling["pooling_mode_lasttoken"] = json!(false);
        pooling["pooling_mode_mean_tokens"] = json!(true);
    }));
    assert_eq!(mean.unwrap().pooling, Pooling::Mean);
    let named = Copy::new().edit(POOLING, |pooling| *pooling = json!({ "pooling_mode": "mean" }));
    assert_eq!(found(named).unwrap().pooling, Pooling::Mean);
    let plain = Copy::new().edit("modules.json", |modules| {
        modules.as_array_mut().unwrap().pop();
    });
    assert!(!found(plain).unwrap().normalize);
    let short = Copy::new().edit("sentence_bert_config.json", |bert| {
        *bert = json!({ "max_seq_length": 100, "do_lower_case": false });
    });
    let short = short.read(Task::Auto).unwrap();
    assert_eq!(short.max_tokens(), 100);

    let own = Copy::new().read(Task::Auto).unwrap();
    assert_eq!((own.spec.head, own.max_tokens()), (OutputHead::None, 256));
    let text = Copy::new().read(Task::Generate).unwrap();
    assert_eq!((text.spec.head, text.embedding), (OutputHead::Tied, None));
    // A model of texts that is asked for vectors.
    let config = golden_path("llama");
    let asked = ModelConfig::read(&config, &serve_as(Pooling::Mean)).unwrap();
    assert_eq!(asked.pooling(), Some(Pooling::Mean));
    assert_eq!(
        ModelConfig::read(&config, &ServeAs::default()).unwrap().embedding,
        None
    );
}

#[test]
fn what_would_give_other_vectors_is_refused() {
    let refused = |copy: Copy, what: &str| {
        let error = copy.read(Task::Auto).unwrap_err();
        assert!(error.contains(what), "{error} does not say {what}");
    };
    let cls = Copy::new().edit(POOLING, |pooling| *pooling = json!({ "pooling_mode": "cls" }));
    refused(cls, "first token");
    let cls = Copy::new().edit(POOLING, |pooling| *pooling = json!({ "pooling_mode": "cls" }));
    let told = ModelConfig::read(cls.0.path(), &serve_as(Pooling::Mean)).unwrap();
    assert_eq!(told.pooling(), Some(Pooling::Mean));
    assert_eq!(cls.read(Task::Generate).unwrap().embedding, None);
    let two = Copy::new().edit(POOLING, |pooling| {
        pooling["pooling_mode_max_tokens"] = json!(true)
    });
    refused(two, "lasttoken and mean are");
    let dense = Copy::new().edit("modules.json", |modules| {
        modules[2]["type"] = json!("sentence_transformers.models.Dense");
    });
    refused(dense, "`Dense`");
    let outside = Copy::new().edit("modules.json", |modules| {
        modules[1]["path"] = json!("../1_Pooling")
    });
    refused(outside, "is not the name of a directory");
    let missing = Copy::new().edit("modules.json", |modules| modules[1]["path"] = json!("2_Pooling"));
    refused(missing, "it is missing");
    let lower = Copy::new().edit("sentence_bert_config.json", |bert| {
        bert["do_lower_case"] = json!(true)
    });
    refused(lower, "do_lower_case");
    let both_ways = Copy::new().edit("config.json", |config| config["is_causal"] = json!(false));
    refused(both_ways, "is_causal");
    let settings = ServeAs {
        normalize: Some(false),
        ..ServeAs::default()
    };
    let error = ModelConfig::read(&golden_path("llama"), &settings).unwrap_err();
    assert!(error.to_string().contains("--runner pooling"), "{error}");
}

#[test]
fn gguf_files_say_how_vectors_are_made() {
    let directory = TempDir::new().unwrap();
    let source = golden_gguf(directory.path(), "qwen3-f16");
    let read = |code: u64| {
        let mut metadata = GgufFile::open(&source).unwrap().metadata().clone();
        metadata.insert("qwen3.pooling_type".to_owned(), MetaValue::UInt(code));
        ModelConfig::from_gguf(
            &source,
            &metadata,
            GgufTensors::default(),
            &HfOverrides::default(),
        )
        .map(|config| config.pooling())
    };
    assert_eq!(read(0).unwrap(), None);
    assert_eq!(read(1).unwrap(), Some(Pooling::Mean));
    assert_eq!(read(3).unwrap(), Some(Pooling::Last));
    for (code, what) in [(2, "first token"), (4, "mean")] {
        let error = read(code).unwrap_err().to_string();
        assert!(
            error.contains(what) && error.contains("qwen3.pooling_type"),
            "{error}"
        );
    }
    // And its tensors make the same vectors.
    for pooling in POOLINGS {
        let model = load_as(&source, serve_as(pooling), &budget()).unwrap();
        for case in golden_vectors("qwen3-f16") {
            let found = vector(&mut runner(&model, 16, 8), &case.prompt, pooling, &[], [&[], &[]]);
            let error = relative_error(&found, case.expected(pooling));
            assert!(error < 1e-5, "{pooling:?}: relative error {error:e}");
        }
    }
}

#[derive(Deserialize)]
struct Pairs {
    cases: Vec<Pair>,
}

#[derive(Deserialize)]
struct Pair {
    tokens: Vec<TokenId>,
    logit: f64,
}

/// What sentence-transformers computes of the same prompts, by a classifier's head and by the logits of two tokens.
#[test]
fn scores_of_cross_encoders_equal_sentence_transformers() {
    for name in ["qwen3-seq-cls", "qwen3-reranker"] {
        let model = load_as(&golden_path(name), ServeAs::default(), &budget()).unwrap();
        let row = model.scoring_row().unwrap();
        assert_eq!(row.len(), model.spec().hidden_size);
        let scoring = model.config().embedding.as_ref().and_then(|e| e.scoring.as_ref());
        assert!(scoring.unwrap().sigmoid, "{name}");
        let text = std::fs::read_to_string(golden_path(name).join("pairs.json")).unwrap();
        for case in serde_json::from_str::<Pairs>(&text).unwrap().cases {
            let limits = StepLimits {
                max_model_len: 256,
                ..LIMITS
            };
            let mut runner = model
                .build_state(&state_config(32, 8), &limits, &budget(), &mut || {})
                .unwrap();
            let vector = vector(&mut runner, &case.tokens, Pooling::Last, &[], [&[], &[]]);
            let logit: f64 = row
                .iter()
                .zip(&vector)
                .map(|(&a, &b)| f64::from(a) * f64::from(b))
                .sum();
            assert!(
                (logit - case.logit).abs() < 1e-4,
                "{name}: {logit} for {}",
                case.logit
            );
        }
    }
    let generates = ServeAs {
        task: Task::Generate,
        ..ServeAs::default()
    };
    let model = load_as(&golden_path("qwen3-reranker"), generates.clone(), &budget()).unwrap();
    assert!(model.scoring_row().is_none() && model.spec().head == OutputHead::Tied);
    let error = load_as(&golden_path("qwen3-seq-cls"), generates, &budget()).unwrap_err();
    assert!(error.to_string().contains("--runner"), "{error}");
}

#[test]
fn what_a_cross_encoder_cannot_be_is_named() {
    let read = |name: &str, file: &str, text: &str, serve_as: ServeAs| {
        let copy = TempDir::new().unwrap();
        std::fs::create_dir(copy.path().join("1_LogitScore")).unwrap();
        for file in ["config.json", "modules.json", "1_LogitScore/config.json"] {
            if let Ok(bytes) = std::fs::read(golden_path(name).join(file)) {
                std::fs::write(copy.path().join(file), bytes).unwrap();
            }
        }
        std::fs::write(copy.path().join(file), text).unwrap();
        ModelConfig::read(copy.path(), &serve_as)
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    let settings = "config_sentence_transformers.json";
    let reranker = |file, text| read("qwen3-reranker", file, text, ServeAs::default()).unwrap_err();
    for (file, text, said) in [
        (
            "1_LogitScore/config.json",
            r#"{"true_token_id": 160}"#,
            "token 160",
        ),
        (
            "1_LogitScore/config.json",
            r#"{"false_token_id": 1}"#,
            "true_token_id",
        ),
        (
            "1_LogitScore/config.json",
            r#"{"true_token_id": 1, "x": 1}"#,
            "`x`",
        ),
        (
            settings,
            r#"{"activation_fn": "torch.nn.modules.activation.Tanh"}"#,
            "Tanh",
        ),
        (
            settings,
            r#"{"default_prompt_name": "a", "prompts": {"b": "c"}}"#,
            "`a`",
        ),
    ] {
        let error = reranker(file, text);
        assert!(error.contains(said), "{text}: {error}");
    }
    let plain = r#"{"activation_fn": "torch.nn.modules.linear.Identity"}"#;
    read("qwen3-seq-cls", settings, plain, ServeAs::default()).unwrap();
    let pooled = serve_as(Pooling::Mean);
    let error = read("qwen3-seq-cls", settings, plain, pooled).unwrap_err();
    assert!(error.contains("--pooler-config"), "{error}");
    let config = std::fs::read_to_string(golden_path("qwen3-seq-cls").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["id2label"] = json!({"0": "A", "1": "B", "2": "C"});
    let error = read(
        "qwen3-seq-cls",
        "config.json",
        &config.to_string(),
        ServeAs::default(),
    )
    .unwrap_err();
    assert!(error.contains("num_labels") && error.contains('3'), "{error}");
}
