//! What browsers get.

use clap::Args;

/// Pages for people.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct PagesArgs {
    /// Disable the pages for browsers: the chat at / and the reference at /docs
    #[arg(long, overrides_with = "no_disable_ui")]
    disable_ui: bool,
    /// Serve these pages (the default)
    #[arg(long, overrides_with = "disable_ui", hide = true)]
    no_disable_ui: bool,
}

impl PagesArgs {
    /// Whether there are pages.
    pub fn pages(&self) -> bool {
        !self.disable_ui
    }
}
