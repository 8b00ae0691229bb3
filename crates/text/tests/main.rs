//! The integration tests of this crate: one program, for each would be linked anew.

mod arguments;
mod common;
mod detokenizer;
mod directory;
mod smollm2;
mod smollm3;
mod templates;
mod tool_calls;
mod vectors;
mod workers;
