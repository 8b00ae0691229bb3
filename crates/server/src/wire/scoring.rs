//! How well texts match: `/score` and `/rerank`, in the shapes of vLLM, which are those of Jina and Cohere.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::common::{Item, OneOrMany};
use super::embedding::EmbeddingUsage;
use super::error::FieldError;
use super::extra::TruncationSide;
use super::fields::{SCORING_UNSUPPORTED, Unsupported};
use super::request::{RequestBody, take};
use super::schema::body;

/// Fields of both endpoints.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ScoringFields {
    /// A name of the served model.
    pub(crate) model: Option<String>,
    /// Truncates texts to this many tokens; -1: to the model's maximum. If absent, longer texts are refused. For a
    /// cross-encoder, a pair's prompt: by its second text.
    #[schema(minimum = -1)]
    pub(crate) truncate_prompt_tokens: Option<i64>,
    /// Which end `truncate_prompt_tokens` cuts off. Default: right, the end.
    pub(crate) truncation_side: Option<TruncationSide>,
}

/// `POST /rerank`.
#[derive(Debug)]
pub(crate) struct RerankRequest {
    pub(crate) common: ScoringFields,
    pub(crate) own: RerankFields,
}

/// The fields of the endpoint.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct RerankFields {
    /// What is looked for.
    pub(crate) query: String,
    /// The texts to rank.
    #[schema(value_type = OneOrMany<Document>)]
    pub(crate) documents: OneOrMany<Document>,
    /// How many of the best documents to return; 0 or absent: all.
    pub(crate) top_n: Option<usize>,
    /// Returns the documents' texts. Default: true.
    pub(crate) return_documents: Option<bool>,
    /// Cohere's: truncates each document to this many tokens. 0 or absent: documents stay whole.
    pub(crate) max_tokens_per_doc: Option<usize>,
}

impl RequestBody for RerankRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[SCORING_UNSUPPORTED];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        Ok(Self {
            common: take(object)?,
            own: take(object)?,
        })
    }
}

body!(
    RerankRequest,
    "Texts to rank by how well they match a query.",
    ScoringFields,
    RerankFields
);

/// A text to rank.
#[derive(Clone, Debug, ToSchema)]
#[serde(untagged)]
pub(crate) enum Document {
    Text(String),
    Object(DocumentText),
}

impl Item for Document {
    const EXPECTED: &str = "a string, or a list of strings and of objects with `text`";
}

/// Not derived: for an enum without a tag, serde forgets where in the value the error is.
impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrObject;

        impl<'de> Visitor<'de> for TextOrObject {
            type Value = Document;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an object with `text`")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Document, E> {
                Ok(Document::Text(text.to_owned()))
            }

            fn visit_string<E: Error>(self, text: String) -> Result<Document, E> {
                Ok(Document::Text(text))
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Document, A::Error> {
                DocumentText::deserialize(MapAccessDeserializer::new(fields)).map(Document::Object)
            }
        }

        deserializer.deserialize_any(TextOrObject)
    }
}

/// The text of a document.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DocumentText {
    pub(crate) text: String,
}

impl Document {
    pub(crate) fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Object(DocumentText { text }) => text,
        }
    }
}

/// The documents, best first.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Ranking {
    pub(crate) id: String,
    pub(crate) model: String,
    pub(crate) usage: EmbeddingUsage,
    pub(crate) results: Vec<Ranked>,
}

/// A document and how well it matches.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Ranked {
    /// Which of the request's documents.
    pub(crate) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) document: Option<DocumentText>,
    /// The cosine of the angle between the vectors of query and document, or a cross-encoder's score.
    pub(crate) relevance_score: f64,
}

/// `POST /score`.
#[derive(Debug)]
pub(crate) struct ScoreRequest {
    pub(crate) common: ScoringFields,
    pub(crate) own: ScoreFields,
}

/// The fields of the endpoint: the texts of both sides, each under one of its names.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ScoreFields {
    /// A text, or as many as the other side has.
    #[schema(value_type = Option<OneOrMany<String>>)]
    pub(crate) text_1: Option<OneOrMany<String>>,
    /// A text or several: each is compared with the text of the other side, or with that at its place.
    #[schema(value_type = Option<OneOrMany<String>>)]
    pub(crate) text_2: Option<OneOrMany<String>>,
    /// vLLM's other name of `text_1`.
    #[schema(value_type = Option<OneOrMany<String>>)]
    pub(crate) queries: Option<OneOrMany<String>>,
    /// vLLM's other name of `text_2`.
    #[schema(value_type = Option<OneOrMany<String>>)]
    pub(crate) documents: Option<OneOrMany<String>>,
    /// vLLM's other name of `text_2`.
    #[schema(value_type = Option<OneOrMany<String>>)]
    pub(crate) items: Option<OneOrMany<String>>,
    /// vLLM's other name of `text_1`.
    #[schema(value_type = Option<OneOrMany<String>>)]
    pub(crate) data_1: Option<OneOrMany<String>>,
    /// vLLM's other name of `text_2`.
    #[schema(value_type = Option<OneOrMany<String>>)]
    pub(crate) data_2: Option<OneOrMany<String>>,
}

impl RequestBody for ScoreRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[SCORING_UNSUPPORTED];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        Ok(Self {
            common: take(object)?,
            own: take(object)?,
        })
    }
}

body!(
    ScoreRequest,
    "Pairs of texts to compare.",
    ScoringFields,
    ScoreFields
);

/// How well the texts of each pair match.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ScoreList {
    pub(crate) id: String,
    /// `list`.
    pub(crate) object: &'static str,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) data: Vec<Score>,
    pub(crate) usage: EmbeddingUsage,
}

/// How well two texts match.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Score {
    /// Which pair.
    pub(crate) index: usize,
    /// `score`.
    pub(crate) object: &'static str,
    /// The cosine of the angle between their vectors, or a cross-encoder's score.
    pub(crate) score: f64,
}
