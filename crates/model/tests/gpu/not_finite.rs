//! What is not finite is the trouble of its own request: not of those beside it, nor of those that get its memory.

use plimsoll_model::LoadOptions;
use plimsoll_model::cuda::GpuModel;

use crate::common::embeddings::{POOLINGS, serve_as};
use crate::common::poisoned::{check_vectors, neighbours, poisoned};
use crate::setup::{Setup, gpu, load_file};

/// Plain attention, windows that leave the token behind, states, and a head that is the embedding.
const POISONED: [&str; 4] = ["llama", "mistral-window", "qwen3_5-vision", "gemma2"];

/// Against steps of the same shapes in which all is finite, so that products round alike. The cache is so small that those blocks are
/// used again, with and without graphs.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn neighbours_and_heirs_of_what_is_not_finite_say_what_they_say_otherwise() {
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
fn a_vector_that_is_not_finite_is_none() {
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
