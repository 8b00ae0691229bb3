//! What the API offers beyond the generation of text, and how it is reached.

use std::path::PathBuf;

use clap::Args;

/// Parts of the API that are off by default, and what is before its paths.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct ApiArgs {
    /// Listen on this Unix socket instead of --host and --port [default: none]
    #[arg(long, value_name = "PATH")]
    pub uds: Option<PathBuf>,
    /// A path that a proxy puts before every other one, such as /llm; requests are accepted with and without it [default: none]
    #[arg(long, value_name = "PATH", value_parser = root_path)]
    pub root_path: Option<String>,
    /// Enable GET /tokenizer_info: the tokenizer's configuration and the chat template
    #[arg(long, overrides_with = "no_enable_tokenizer_info_endpoint")]
    pub enable_tokenizer_info_endpoint: bool,
    /// Do not offer it (the default)
    #[arg(long, overrides_with = "enable_tokenizer_info_endpoint", hide = true)]
    no_enable_tokenizer_info_endpoint: bool,
    /// Enable GET /load: the number of requests in progress
    #[arg(long, overrides_with = "no_enable_server_load_tracking")]
    pub enable_server_load_tracking: bool,
    /// Do not offer it (the default)
    #[arg(long, overrides_with = "enable_server_load_tracking", hide = true)]
    no_enable_server_load_tracking: bool,
    /// Name tokens in log-probabilities by id (token_id:17), as if every request had return_tokens_as_token_ids
    #[arg(long, overrides_with = "no_return_tokens_as_token_ids")]
    pub return_tokens_as_token_ids: bool,
    /// Let requests decide (the default)
    #[arg(long, overrides_with = "return_tokens_as_token_ids", hide = true)]
    no_return_tokens_as_token_ids: bool,
    /// Report the usage at the end of every stream, as if every request had stream_options.include_usage
    #[arg(long, overrides_with = "no_enable_force_include_usage")]
    pub enable_force_include_usage: bool,
    /// Let requests decide (the default)
    #[arg(long, overrides_with = "enable_force_include_usage", hide = true)]
    no_enable_force_include_usage: bool,
}

/// A path without a slash at its end; empty for none.
fn root_path(text: &str) -> Result<String, String> {
    let path = text.trim_end_matches('/');
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/-._~".contains(c);
    match path {
        "" => Ok(String::new()),
        path if path.starts_with('/') && path.chars().all(is_plain) => Ok(path.to_owned()),
        _ => Err(
            "a path begins with / and has letters, digits and characters of -._~ between slashes".to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_paths() {
        assert_eq!(root_path("/llm/"), Ok("/llm".to_owned()));
        assert_eq!(root_path("/a/b"), Ok("/a/b".to_owned()));
        assert_eq!(root_path("/"), Ok(String::new()));
        for wrong in ["llm", "/a b", "/a?b", "http://x/y"] {
            assert!(root_path(wrong).is_err(), "{wrong}");
        }
    }
}
