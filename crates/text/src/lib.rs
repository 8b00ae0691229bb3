//! Text in, tokens out, and back: tokenizers (`tokenizer.json`, GGUF metadata, plain bytes), incremental detokenization,
//! stop strings, prompts to fill in the middle, chat templates rendered as Hugging Face transformers renders them, and answers taken apart into reasoning,
//! content and calls of tools.
//!
//! No device code and no network. Everything is a pure function of files and metadata, but that chat templates, which are
//! programs, may be rendered in processes of their own.

mod answer;
mod bounds;
mod detokenizer;
mod directory;
mod error;
mod fim;
mod gguf;
pub mod grammar;
mod guard;
mod harmony;
mod limits;
mod pattern;
mod pipeline;
mod special_texts;
mod stop;
mod template;
mod tokenizer;
mod vocab;

pub use answer::{
    AnswerFormat, AnswerParser, CallGrammar, Function, JsonAnswer, Part, Position, ReasoningFormat,
    ToolFormat,
};
pub use bounds::RenderLimit;
pub use detokenizer::Detokenizer;
pub use directory::tokenizer_config;
pub use error::TextError;
pub use fim::Fim;
pub use stop::{Scanned, StopMatcher};
pub use template::{ChatInput, ChatTemplate, Clock, Renderer, WorkerProgram, run_template_worker};
pub use tokenizer::{SpecialTokens, Tokenizer};
