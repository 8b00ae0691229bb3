//! A request whose rows are NaN fails alone: requests beside it do not change, nor do those that reuse its memory.

use plimsoll_model::LoadOptions;
use plimsoll_model::cuda::GpuModel;

use crate::common::embeddings::{POOLINGS, serve_as};
use crate::common::poisoned::{check_vectors, neighbours, poisoned};
use crate::setup::{Setup, gpu, load_file};

/// Plain attention, windows that leave the token behind, states, and a head that is the embedding.
const POISONED: [&str; 4] = ["llama", "mistral-window", "qwen3_5-vision", "gemma2"];

/// Compared with finite steps of the same shapes, so that products round alike. The cache is so small that blocks are reused; with and
/// without graphs.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn nan_in_one_request_changes_no_other_text() {
    let gpu = gpu();
    for name in POISONED {
        let directory = poisoned(name);
        let model = load_file(&gpu, directory.path());
        for block_size in [8, 16, 32] {
            for enforce_eager in [false, true] {
                let setup = Setup {
                    block_size,
                    tokens: 8 * block_size,
                    enforce_eager,
                };
                let expected = neighbours(&mut setup.build(&model), false);
                let found = neighbours(&mut setup.build(&model), true);
                assert_eq!(found, expected, "{name}, {setup:?}");
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_nan_vector_is_reported() {
    let gpu = gpu();
    let directory = poisoned("llama");
    for pooling in POOLINGS {
        let options = LoadOptions {
            serve_as: serve_as(pooling),
            ..Default::default()
        };
        let model = GpuModel::load(directory.path(), options, &gpu, &mut |_| ()).unwrap();
        let setup = Setup {
            block_size: 8,
            tokens: 64,
            enforce_eager: true,
        };
        check_vectors(&mut setup.build(&model), pooling);
    }
}
