//! The integration tests of this crate: one program, for each would be linked anew.

mod config;
mod docs;
mod hub;
mod migration;
mod plan;
mod selftest;
mod serve;
