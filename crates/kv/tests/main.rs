//! The integration tests of this crate: one program, for each would be linked anew.

mod groups;
mod manager;
mod model;
mod slots;
