//! Layers that keep different things, in pages of one size.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use crate::common::groups::{Tables, grouped, hits_past_the_window, logits_of_chunks, serve_twice};
use crate::common::*;
use plimsoll_core::{BlockSize, CacheGroups, Component, KvConfig, StateConfig};
use plimsoll_model::{Architecture, HfOverrides, KvCacheDtype, LoadFormat, LoadOptions, Model, ModelConfig};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

use crate::common::configs::config_json;
use crate::experts::bare;

/// Of what a block of each group holds, in every published configuration. Blocks of 8 tokens cannot be cut into slices, so with those
/// Gemma 4's wide layers lose more.
#[test]
fn rounding_takes_at_most_2_percent() {
    let (mut families, mut beyond) = (HashSet::new(), Vec::new());
    for directory in ["configs", "configs-moe"] {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests")
            .join(directory);
        for file in directory.read_dir().unwrap() {
            let path = file.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            let config = ModelConfig::from_json(&path, &text, &HfOverrides::default()).unwrap();
            families.insert(config.architecture);
            for block_size in [8, 16, 32] {
                let groups = config.spec.cache_groups(BlockSize::new(block_size).unwrap());
                let lost = |group| groups.unused_columns(group) as f64 / group.columns as f64;
                let most = groups.iter().map(lost).fold(0.0, f64::max);
                if most > 0.02 {
                    beyond.push((path.file_stem().unwrap().to_owned(), block_size));
                }
            }
        }
    }
    beyond.sort();
    assert_eq!(beyond, [("gemma-4-26B-A4B-it".into(), 8)]);
    let without = Architecture::ALL
        .into_iter()
        .filter(|family| !families.contains(family));
    assert_eq!(
        without.collect::<Vec<_>>(),
        [Architecture::Qwen3Next, Architecture::Gemma4Unified],
        "families without a published configuration here"
    );
}

/// With blocks behind the window gone and their pages used again, every logit is that of a cache that keeps everything.
#[test]
fn nobody_sees_what_lies_behind_the_window() {
    for seed in (0..6).chain([rand::random()]) {
        let mut rng = StdRng::seed_from_u64(seed);
        let models = WINDOW_MODELS.map(|name| (name, load(name, KvCacheDtype::F32)));
        for (name, model) in models.into_iter().chain([("in slices", sliced())]) {
            let block_size = [8, 16, 32][rng.random_range(0..3)];
            let groups = model.spec().cache_groups(BlockSize::new(block_size).unwrap());
            let prompt: Vec<u32> = (0..rng.random_range(40..128))
                .map(|_| rng.random_range(0..160))
                .collect();
            let (mut ends, mut end) = (Vec::new(), 0);
            while end < prompt.len() {
                end = (end + rng.random_range(1..20)).min(prompt.len());
                ends.push(end);
            }
            let full = KvConfig {
                groups: CacheGroups::default(),
                ..state_config(block_size, 16).kv
            };
            let mut kv = KvConfig { groups, ..full };
            kv.num_pages = kv.request_pages(prompt.len(), 20);
            let logits = |kv: KvConfig| {
                let budget = budget();
                let config = StateConfig {
                    kv,
                    ..state_config(block_size, 0)
                };
                let mut runner = model.build_state(&config, &LIMITS, &budget, &mut || {}).unwrap();
                let held = budget.meters().by_component.get(Component::Kv);
                assert_eq!(held, model.kv_bytes(kv), "seed {seed}: {name}");
                let mut tables = Tables::new(kv.groups, kv.block_size, kv.num_pages);
                logits_of_chunks(&mut runner, &mut tables, &prompt, &ends)
            };
            assert_eq!(logits(kv), logits(full), "seed {seed}: {name}, {block_size}");
        }
    }
}

/// Random weights for layers of which three share a page: those with full attention whole blocks, wide ones with a window slices of them.
fn sliced() -> Arc<Model> {
    let mut config = config_json("gemma4-moe");
    config["num_hidden_layers"] = json!(6);
    config["layer_types"] = json!(["sliding_attention", "full_attention"].repeat(3));
    let full = json!({ "head_dim": 128, "num_key_value_heads": 1 });
    config["per_layer_config"] = json!({ "1": full, "3": full, "5": full });
    let options = LoadOptions {
        format: LoadFormat::Dummy { seed: 1 },
        kv_cache_dtype: KvCacheDtype::F32,
        ..Default::default()
    };
    let model = Model::load(bare(&config).path(), options, &budget(), &mut |_| ()).unwrap();
    let groups = model.spec().cache_groups(BlockSize::default());
    let cut = groups.iter().map(|group| (group.slices, group.pages_per_block));
    assert_eq!(groups.columns_per_page(), 3);
    assert_eq!(cut.collect::<Vec<_>>(), [(1, 1), (2, 2)]);
    model
}

/// Of a window, a request that begins with cached tokens needs only what its next token sees.
#[test]
fn prefix_hits_past_the_window_change_no_text() {
    for name in WINDOW_MODELS {
        let model = load(name, KvCacheDtype::F32);
        let cases = golden(name).cases;
        for block_size in [8, 16, 32] {
            for (case, (hit, chunk)) in hits_past_the_window(&cases, block_size) {
                let kv = grouped(model.spec(), block_size, chunk);
                let config = StateConfig {
                    kv,
                    ..state_config(block_size, 0)
                };
                let mut runner = model
                    .build_state(&config, &LIMITS, &budget(), &mut || {})
                    .unwrap();
                let mut told = 0;
                serve_twice(&mut runner, kv, case, (hit, chunk), &mut |index, token| {
                    let what = format!("{name}, blocks of {block_size}, {hit} cached, chunks of {chunk}");
                    assert_eq!(token, case.greedy[index], "{what}, token {index}");
                    told += 1;
                });
                assert_eq!(told, 2 * case.greedy.len());
            }
        }
    }
}

/// A request's tables that lack what its step sees, or have too little, are refused.
#[test]
fn tables_must_hold_what_a_step_sees() {
    let model = load("qwen2-window", KvCacheDtype::F32);
    let groups = model.spec().cache_groups(BlockSize::new(8).unwrap());
    assert_eq!(groups.as_slice().len(), 2);
    let config = StateConfig {
        kv: KvConfig {
            groups,
            ..state_config(8, 64).kv
        },
        ..state_config(8, 0)
    };
    let mut runner = model
        .build_state(&config, &LIMITS, &budget(), &mut || {})
        .unwrap();
    let mut tables = Tables::new(groups, config.kv.block_size, 64);
    let good = tables.reserve(40, 60);
    let mut refused = |change: &dyn Fn(&mut plimsoll_core::Run), message: &str| {
        let mut run = run(1, 40, &[5; 20], &[]);
        run.tables = good.clone();
        change(&mut run);
        let error = runner.logits(&plan(vec![run]), &[0]).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    };
    refused(&|run| run.tables.truncate(1), "1 block tables; 2 are needed");
    refused(&|run| run.tables[1].first += 1, "are needed (window of");
    refused(&|run| run.tables[0].first += 1, "are needed (full)");
    let short = |run: &mut plimsoll_core::Run| {
        let len = run.tables[1].pages.len();
        run.tables[1].pages.truncate(len - 1);
    };
    refused(&short, "are needed (window of");
    refused(&|run| run.tables[1].pages[0].0 = 64, "page 64 of 64");
    let last = |run: &plimsoll_core::Run| *run.tables[0].pages.last().unwrap();
    refused(
        &|run| *run.tables[1].pages.last_mut().unwrap() = last(run),
        "twice",
    );
}
