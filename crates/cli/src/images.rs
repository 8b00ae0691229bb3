//! Images of prompts: the processor that comes with a model, and the most that its encoder is asked for.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use plimsoll_core::EncoderLimits;
use plimsoll_core::untrusted::{self, MAX_SETTINGS_BYTES};
use plimsoll_images::Processor;
use plimsoll_model::{ModelConfig, Task};
use serde_json::Value;

use crate::error::Error;
use crate::settings::EngineSettings;

/// Files that say how pictures become patches; newer versions of transformers write the second, with the first as a part.
const PREPROCESSOR: &str = "preprocessor_config.json";
const PROCESSOR: &str = "processor_config.json";

/// Pixels of an image after resizing, unless a flag says otherwise: CPUs encode larger ones for minutes.
const MAX_PIXELS: usize = 1 << 20;

/// How the model in this directory takes images; `None` where it takes none, or text alone is asked for.
///
/// # Errors
/// Where its files cannot be read, or say something that is not supported.
pub(crate) fn processor(model: &Path, settings: &EngineSettings) -> Result<Option<Processor>, Error> {
    if settings.max_images == 0 || settings.serve_as.task == Task::Embed || !model.is_dir() {
        return Ok(None);
    }
    let config = ModelConfig::read(model, &settings.serve_as.without_images())?;
    let has_encoder = config.text_part_of.is_some_and(|around| around.has_encoder());
    if config.embedding.is_some() || !has_encoder {
        return Ok(None);
    }
    let preprocessor = match json(&model.join(PREPROCESSOR))? {
        Some(fields) => Some(fields),
        None => json(&model.join(PROCESSOR))?
            .and_then(|mut fields| fields.get_mut("image_processor").map(Value::take)),
    };
    let Some(preprocessor) = preprocessor else {
        tracing::warn!("images are not served: {} has no {PREPROCESSOR}", model.display());
        return Ok(None);
    };
    let config = json(&model.join("config.json"))?.unwrap_or_default();
    let processor = Processor::new(&preprocessor, &config);
    let processor =
        processor.and_then(|processor| processor.bounded(settings.max_pixels.unwrap_or(MAX_PIXELS)));
    processor.map(Some).map_err(|error| Error::Images {
        directory: model.to_owned(),
        error,
    })
}

/// The settings of a start of this model.
///
/// # Errors
/// As [`processor`].
pub(crate) fn settings_of(
    model: &Path,
    settings: &Arc<EngineSettings>,
) -> Result<Arc<EngineSettings>, Error> {
    let Some(processor) = processor(model, settings)? else {
        return Ok(Arc::clone(settings));
    };
    let mut settings = EngineSettings::clone(settings);
    settings.serve_as.images = Some(EncoderLimits {
        max_patches: processor.worst_image().plan.grid.patches(),
        max_images_per_prompt: settings.max_images,
    });
    Ok(Arc::new(settings))
}

/// `None` where there is no such file.
fn json(path: &Path) -> Result<Option<Value>, Error> {
    let unreadable = |source| Error::Unreadable {
        path: path.to_owned(),
        source,
    };
    let text = untrusted::if_there(untrusted::read_text(path, MAX_SETTINGS_BYTES)).map_err(unreadable)?;
    let value = text.map(|text| serde_json::from_str(&text)).transpose();
    value.map_err(|error| unreadable(std::io::Error::new(ErrorKind::InvalidData, error)))
}
