//! A request whose rows are NaN fails alone: requests beside it do not change, nor do those that reuse its memory.

use std::path::Path;
use std::sync::Arc;

use crate::common::embeddings::{POOLINGS, serve_as};
use crate::common::poisoned::{check_vectors, good_prompt, late_prompt, neighbours, poisoned};
use crate::common::*;
use plimsoll_core::TokenId;
use plimsoll_model::{LoadOptions, Model, ServeAs};

/// Plain attention, windows that leave the token behind, states, experts, and a head that is the embedding.
const POISONED: [&str; 5] = ["llama", "mistral-window", "qwen3-next", "qwen3-moe", "gemma2"];

fn load_from(path: &Path, serve_as: ServeAs) -> Arc<Model> {
    let options = LoadOptions {
        serve_as,
        ..Default::default()
    };
    Model::load(path, options, &budget(), &mut |_| ()).unwrap()
}

#[test]
fn nan_in_one_request_changes_no_other_text() {
    for name in POISONED {
        let directory = poisoned(name);
        let model = load_from(directory.path(), ServeAs::default());
        let alone = |prompt: Vec<TokenId>, len: usize| {
            greedy_alone(&mut runner(&model, 8, 8), &prompt, &blocks(0..8), len)
        };
        let expected = [alone(good_prompt(), 11), alone(late_prompt(), 12)];
        for block_size in [8, 16, 32] {
            let found = neighbours(&mut runner(&model, block_size, 8), true);
            assert_eq!(found, expected, "{name}, blocks of {block_size}");
        }
        assert_eq!(neighbours(&mut runner(&model, 8, 8), false), expected, "{name}");
    }
}

#[test]
fn a_nan_vector_is_reported() {
    let directory = poisoned("llama");
    for pooling in POOLINGS {
        let model = load_from(directory.path(), serve_as(pooling));
        check_vectors(&mut runner(&model, 8, 8), pooling);
    }
}
