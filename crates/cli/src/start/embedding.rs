//! How a model that is served for embeddings answers.

use plimsoll_core::Matryoshka;
use plimsoll_model::{EmbeddingConfig, ModelConfig};
use plimsoll_server::EmbeddingInfo;
use plimsoll_sim::SimModel;

use crate::args::EngineArgs;
use crate::error::Error;

/// Of a model that was loaded; `None` where it is served for text.
pub(super) fn of_model(config: &ModelConfig) -> Option<EmbeddingInfo> {
    let embedding = config.embedding.as_ref()?;
    let matryoshka = config.matryoshka.clone();
    Some(info(embedding, config.spec.hidden_size, matryoshka))
}

/// Of the simulated model.
pub(super) fn simulated(args: &EngineArgs) -> Result<Option<EmbeddingInfo>, Error> {
    let serve_as = args.serve_as();
    let matryoshka = serve_as.hf_overrides.matryoshka()?;
    let embedding = serve_as.resolve(None)?;
    Ok(embedding.map(|embedding| info(&embedding, SimModel::WIDTH, matryoshka)))
}

fn info(embedding: &EmbeddingConfig, size: usize, matryoshka: Matryoshka) -> EmbeddingInfo {
    EmbeddingInfo {
        pooling: embedding.pooling,
        normalize: embedding.normalize,
        size,
        matryoshka,
    }
}
