//! What browsers get.

use clap::Args;

/// Pages for people.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct PagesArgs {
    /// Serve no pages for browsers: neither the chat at / nor the reference at /docs
    #[arg(long, overrides_with = "no_disable_ui")]
    disable_ui: bool,
    /// Serve them (the default)
    #[arg(long, overrides_with = "disable_ui", hide = true)]
    no_disable_ui: bool,
}

impl PagesArgs {
    /// Whether there are pages.
    pub fn pages(&self) -> bool {
        !self.disable_ui
    }
}
