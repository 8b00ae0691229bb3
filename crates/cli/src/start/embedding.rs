//! How a model that is served for embeddings answers.

use plimsoll_core::Matryoshka;
use plimsoll_model::{EmbeddingConfig, ModelConfig};
use plimsoll_server::EmbeddingInfo;
use plimsoll_sim::SimModel;

use crate::args::EngineArgs;
use crate::error::Error;

/// Of a model that was loaded; `None` where it is served for text.
pub(super) fn of_model(config: &ModelConfig, args: &EngineArgs) -> Option<EmbeddingInfo> {
    let embedding = config.embedding.as_ref()?;
    Some(info(
        embedding,
        config.spec.hidden_size,
        config.matryoshka.clone(),
        args,
    ))
}

/// Of the simulated model.
pub(super) fn simulated(args: &EngineArgs) -> Result<Option<EmbeddingInfo>, Error> {
    let embedding = args.pooling.serve_as().resolve(None)?;
    Ok(embedding.map(|embedding| info(&embedding, SimModel::WIDTH, Matryoshka::No, args)))
}

fn info(embedding: &EmbeddingConfig, size: usize, own: Matryoshka, args: &EngineArgs) -> EmbeddingInfo {
    EmbeddingInfo {
        pooling: embedding.pooling,
        normalize: embedding.normalize,
        size,
        matryoshka: args.pooling.matryoshka(own),
    }
}
