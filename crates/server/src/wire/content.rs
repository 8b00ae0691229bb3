use std::fmt;

use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::error::FieldError;
use super::request::typed;

/// Content of a chat message or of a response's item: text, or parts.
#[derive(Clone, Debug, ToSchema)]
#[serde(untagged)]
pub(crate) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// Not derived: for an enum without a tag, serde forgets where in the value the error is.
impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrParts;

        impl<'de> Visitor<'de> for TextOrParts {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of parts")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }

            fn visit_string<E: Error>(self, text: String) -> Result<Content, E> {
                Ok(Content::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<Content, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(parts)).map(Content::Parts)
            }
        }

        deserializer.deserialize_any(TextOrParts)
    }
}

/// One part: `text` (`input_text` and `output_text` in items), `image_url` (`input_image` in items), or `refusal`.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct Part {
    /// The part's type.
    #[schema(example = "text")]
    r#type: String,
    /// The text.
    text: Option<String>,
    /// The text of a `refusal` part.
    refusal: Option<String>,
    /// The image: a data URL in base64, or an address that the server may fetch; in chat usually within an object.
    #[schema(value_type = Option<ImageUrl>)]
    image_url: Option<Value>,
    /// Of `input_image`: as in `image_url`.
    #[schema(value_type = Option<Detail>)]
    detail: Option<Value>,
}

/// An image's address, alone or in an object.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a URL, or an object with `url` and `detail`")]
pub(crate) enum ImageUrl {
    /// The address.
    Url(String),
    /// The address and how closely to look.
    Object(ImageObject),
}

/// An image's address, and how closely to look.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageObject {
    /// A data URL in base64, or an address that the server may fetch.
    url: String,
    /// A hint without effect: the model's own limits and `mm_processor_kwargs` determine the size.
    #[serde(rename = "detail")]
    _detail: Option<Detail>,
}

/// How closely to look at an image. A hint without effect: open models choose the size by rules of their own.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Detail {
    Auto,
    Low,
    High,
    Original,
}

/// An image of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImagePart {
    /// Where it is: a data URL, or an address.
    pub(crate) url: String,
    /// The path of the part in the request.
    pub(crate) field: String,
    /// The part's type, as the API names it.
    pub(crate) kind: &'static str,
}

/// A piece of content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    Text(String),
    Image(ImagePart),
}

/// Content in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pieces(pub(crate) Vec<Piece>);

/// Fields of an image part until the image is loaded.
pub(crate) const SOURCE: &str = "source";
pub(crate) const FIELD: &str = "field";
pub(crate) const KIND: &str = "kind";

impl From<String> for Pieces {
    fn from(text: String) -> Self {
        Self(vec![Piece::Text(text)])
    }
}

impl Pieces {
    /// Adds a text, on a new line of the text before it.
    pub(crate) fn push_text(&mut self, text: String) {
        match self.0.last_mut() {
            Some(Piece::Text(before)) => {
                before.push('\n');
                before.push_str(&text);
            }
            _ => self.0.push(Piece::Text(text)),
        }
    }

    /// Puts a text before all others, on the same line.
    pub(crate) fn put_before(&mut self, text: &str) {
        match self.0.first_mut() {
            Some(Piece::Text(first)) => first.insert_str(0, text),
            _ => self.0.insert(0, Piece::Text(text.to_owned())),
        }
    }

    /// The first image.
    pub(crate) fn image(&self) -> Option<&ImagePart> {
        self.0.iter().find_map(|piece| match piece {
            Piece::Image(image) => Some(image),
            Piece::Text(_) => None,
        })
    }

    /// All of it as one text, if there are no images. Parts are joined by newlines, as vLLM does for templates that take text.
    fn text(&self) -> Option<String> {
        let texts = self.0.iter().map(|piece| match piece {
            Piece::Text(text) => Some(text.as_str()),
            Piece::Image(_) => None,
        });
        Some(texts.collect::<Option<Vec<_>>>()?.join("\n"))
    }

    /// For chat templates: a text, or parts of which the images still say where they come from.
    pub(crate) fn into_value(self) -> Value {
        if let Some(text) = self.text() {
            return json!(text);
        }
        let parts = self.0.into_iter().map(|piece| match piece {
            Piece::Text(text) => json!({ "type": "text", "text": text }),
            Piece::Image(ImagePart { url, field, kind }) => {
                json!({ "type": "image", SOURCE: url, FIELD: field, KIND: kind })
            }
        });
        parts.collect()
    }
}

impl Content {
    /// Its parts; `field` is the content's path.
    pub(crate) fn pieces(self, field: &str) -> Result<Pieces, FieldError> {
        let parts = match self {
            Self::Text(text) => return Ok(text.into()),
            Self::Parts(parts) => parts,
        };
        let parts = parts.into_iter().enumerate();
        let pieces = parts.map(|(i, part)| part.into_piece(&format!("{field}[{i}]")));
        pieces.collect::<Result<_, _>>().map(Pieces)
    }
}

impl Part {
    fn into_piece(self, field: &str) -> Result<Piece, FieldError> {
        let missing = |name: &str| {
            let field = format!("{field}.{name}");
            FieldError::invalid(&field, format!("`{field}` is missing"))
        };
        let kind = match self.r#type.as_str() {
            "text" | "input_text" | "output_text" => {
                return self.text.map(Piece::Text).ok_or_else(|| missing("text"));
            }
            // An assistant's refusal to answer.
            "refusal" => return self.refusal.map(Piece::Text).ok_or_else(|| missing("refusal")),
            "image_url" => "image_url",
            "input_image" => "input_image",
            other => {
                let hint = match other {
                    "video_url" | "input_video" | "video" => {
                        "send frames of the video as images, to a model that takes them"
                    }
                    _ => "only text is, and images with models that take them",
                };
                return Err(FieldError::unsupported(format!("{field}.type = {other}"), hint));
            }
        };
        if let Some(detail) = self.detail {
            typed::<Detail>(detail, &format!("{field}.detail"))?;
        }
        let at = format!("{field}.image_url");
        let url = match self.image_url {
            // For an error that names the field within it.
            Some(object @ Value::Object(_)) => typed::<ImageObject>(object, &at)?.url,
            Some(other) => match typed(other, &at)? {
                ImageUrl::Url(url) | ImageUrl::Object(ImageObject { url, .. }) => url,
            },
            None => return Err(missing("image_url")),
        };
        Ok(Piece::Image(ImagePart {
            url,
            field: field.to_owned(),
            kind,
        }))
    }
}
