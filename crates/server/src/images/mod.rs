//! Images of requests: from their addresses to what the model's encoder reads.

mod data_url;
mod fetch;

use std::sync::Arc;

use plimsoll_images::{DecodeLimits, Header, Overrides, Plan, decode, inspect};
use serde_json::Value;

use crate::blocking::blocking;
use crate::error::ApiError;
use crate::image_input::{ImageInput, Prepared};
use crate::request_memory::{Reservation, shrink};
use crate::state::AppState;
use crate::wire::content::{FIELD, KIND, SOURCE};

/// What is prepared of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// Their sizes, which determine the tokens.
    Sizes,
    /// All that the encoder needs.
    Pixels,
}

/// The images of a prompt, and the memory that they take.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    pub(crate) images: Vec<Prepared>,
    pub(crate) memory: Option<Reservation>,
}

/// Where an image is.
#[derive(Debug)]
struct Source {
    url: String,
    /// The path of its part in the request.
    field: String,
    kind: String,
}

impl Source {
    /// The field for errors about the part's type.
    fn of_type(&self) -> String {
        format!("{}.type = {}", self.field, self.kind)
    }

    fn wrong(&self, why: impl std::fmt::Display) -> ApiError {
        wrong(&self.field, why)
    }
}

fn wrong(field: &str, why: impl std::fmt::Display) -> ApiError {
    ApiError::invalid(field, format!("`{field}`: {why}"))
}

const ONLY_TEXT: &str = "this model takes only text";

/// Takes the addresses out of the image parts of messages.
fn take(messages: &mut [Value]) -> Vec<Source> {
    let contents = messages
        .iter_mut()
        .filter_map(|message| message["content"].as_array_mut());
    let parts = contents.flatten().filter_map(Value::as_object_mut);
    let source = |part: &mut serde_json::Map<String, Value>| {
        let mut text = |name: &str| match part.shift_remove(name) {
            Some(Value::String(text)) => Some(text),
            _ => None,
        };
        Some(Source {
            url: text(SOURCE)?,
            field: text(FIELD)?,
            kind: text(KIND)?,
        })
    };
    parts.filter_map(source).collect()
}

/// Loads the images of `messages`, which then hold none of their data. `field` is that of the conversation.
pub(crate) async fn load(
    state: &AppState,
    messages: &mut [Value],
    overrides: Overrides,
    depth: Depth,
    field: &'static str,
) -> Result<Loaded, ApiError> {
    let sources = take(messages);
    let model = Arc::clone(state.model());
    let limit = &state.options().media;
    let Some(first) = sources.first() else {
        return match model.images.is_none() && !overrides.is_empty() {
            true => Err(ApiError::unsupported("mm_processor_kwargs", ONLY_TEXT)),
            false => Ok(Loaded::default()),
        };
    };
    if model.images.is_none() {
        return Err(ApiError::unsupported(first.of_type(), ONLY_TEXT));
    }
    if limit.max_images == 0 {
        let hint = "images are turned off by --limit-mm-per-prompt";
        return Err(ApiError::unsupported(first.of_type(), hint));
    }
    if let Some(source) = sources.get(limit.max_images) {
        let why = format!(
            "the request has {} images; at most {} are allowed (--limit-mm-per-prompt)",
            sources.len(),
            limit.max_images
        );
        return Err(source.wrong(why));
    }
    let bounds = DecodeLimits {
        max_bytes: limit.max_bytes,
        ..DecodeLimits::default()
    };
    // Data URLs are part of the body, which has its own reservation.
    let remote = sources
        .iter()
        .filter(|source| !data_url::is_one(&source.url))
        .count();
    let _files = match remote {
        0 => None,
        count => Some(
            state
                .fetch_memory()
                .reserve(count.saturating_mul(limit.max_bytes))
                .await?,
        ),
    };
    let mut files = Vec::with_capacity(sources.len());
    for source in sources {
        let bytes = match data_url::is_one(&source.url) {
            true => None,
            false => Some(fetch(state, &source).await?),
        };
        files.push((source, bytes));
    }
    let limits = state.engine().limits();
    let planning = Arc::clone(&model);
    let files = blocking(move || {
        let files = files.into_iter().map(|(source, bytes)| {
            let bytes = match bytes {
                Some(bytes) => bytes,
                None => data_url::decode(&source.url).map_err(|why| source.wrong(why))?,
            };
            let header = inspect(&bytes, &bounds).map_err(|error| source.wrong(error))?;
            let processor = planning.images.as_ref().map(ImageInput::processor);
            let plan = processor.map(|processor| processor.plan(header.width, header.height, &overrides));
            let plan = plan.transpose().map_err(|error| blamed(&source.field, error))?;
            let plan = plan.ok_or_else(|| ApiError::Internal("the model has no processor".into()))?;
            Ok(File {
                field: source.field,
                bytes,
                header,
                plan,
            })
        });
        files.collect::<Result<Vec<_>, ApiError>>()
    })
    .await?;
    let rows: usize = files.iter().map(|file| file.plan.rows).sum();
    let most = limits.max_request_tokens();
    if rows >= most {
        let count = files.len();
        return Err(ApiError::ContextLength {
            message: format!(
                "this server's maximum context length is {most} tokens, but {count} image{} alone {} {rows}: send smaller or fewer \
                 images",
                if count == 1 { "" } else { "s" },
                if count == 1 { "takes" } else { "take" },
            ),
            param: field,
            prompt: rows,
            limit: most,
        });
    }
    if depth == Depth::Sizes {
        let images = files.into_iter().map(|file| Prepared {
            plan: file.plan,
            image: None,
        });
        return Ok(Loaded {
            images: images.collect(),
            memory: None,
        });
    }
    let mut memory = state.image_memory().reserve(memory(&files)).await?;
    let kept = pixel_bytes(&files);
    // Decoding and resizing take all of a core: not all of them at once, however many requests there are.
    let turn = state.processing_turn().await;
    // The work goes on where the client leaves, and so do its reservations.
    blocking(move || {
        let _turn = turn;
        let processor = model.images.as_ref().map(|input: &ImageInput| input.processor());
        let processor = processor.ok_or_else(|| ApiError::Internal("the model has no processor".into()))?;
        let images = files.into_iter().map(|file| {
            let pixels = decode(&file.bytes, &bounds).map_err(|error| wrong(&file.field, error))?;
            drop(file.bytes);
            let image = processor
                .process(&pixels, &overrides)
                .map_err(|error| blamed(&file.field, error))?;
            Ok(Prepared {
                plan: file.plan,
                image: Some(Arc::new(image)),
            })
        });
        let images = images.collect::<Result<Vec<_>, ApiError>>()?;
        // Files and pixels are gone.
        shrink(&mut memory, kept);
        Ok(Loaded {
            images,
            memory: Some(memory),
        })
    })
    .await
}

/// A file whose header was read.
struct File {
    field: String,
    bytes: Vec<u8>,
    header: Header,
    plan: Plan,
}

/// Bytes that the images take at most: the pixels of all, and what decoding takes of one at a time.
fn memory(files: &[File]) -> usize {
    let pixels = |file: &File| {
        let resized = file.plan.width * (file.plan.height + file.header.height) * 3;
        file.header.memory + resized
    };
    let bytes: usize = files.iter().map(|file| file.bytes.len()).sum();
    pixel_bytes(files) + bytes + files.iter().map(pixels).max().unwrap_or(0)
}

fn pixel_bytes(files: &[File]) -> usize {
    files.iter().map(|file| file.plan.pixel_bytes).sum()
}

/// An error of the processor, with the field that is wrong: the image or `mm_processor_kwargs`.
fn blamed(field: &str, error: plimsoll_images::ImageError) -> ApiError {
    match error {
        plimsoll_images::ImageError::Override { field, why } => {
            wrong(&format!("mm_processor_kwargs.{field}"), format!("{field} {why}"))
        }
        error => wrong(field, error),
    }
}

async fn fetch(state: &AppState, source: &Source) -> Result<Vec<u8>, ApiError> {
    let media = &state.options().media;
    let web = ["http://", "https://"];
    let is_web = |url: &str| {
        let start = url.get(..8).unwrap_or(url).to_ascii_lowercase();
        web.iter().any(|scheme| start.starts_with(scheme))
    };
    if !is_web(&source.url) {
        let why =
            "the image's address must be a data URL (`data:image/png;base64,...`), or one of http or https";
        return Err(source.wrong(why));
    }
    if media.allowed_domains.is_empty() {
        let why = "this server fetches no images: send the image as a data URL, or start the server with \
                   --allowed-media-domains";
        return Err(source.wrong(why));
    }
    let fetched = fetch::Fetch {
        domains: &media.allowed_domains,
        max_bytes: media.max_bytes,
        timeout: media.fetch_timeout,
        may_reach: fetch::is_public,
    };
    fetched.get(&source.url).await.map_err(|why| source.wrong(why))
}
