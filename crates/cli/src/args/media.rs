//! Images of requests.

use std::num::NonZeroUsize;
use std::str::FromStr;

use clap::{ArgAction, Args};
use plimsoll_server::MediaLimits;
use serde::Deserialize;

use crate::args::values::json;

/// Where images of requests come from.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct MediaArgs {
    /// Hosts from which images are fetched when requests have their http(s) addresses, such as upload.wikimedia.org; their
    /// addresses must be public [default: none, images are sent as data URLs]
    #[arg(long, value_name = "HOST", num_args = 1.., action = ArgAction::Set)]
    allowed_media_domains: Option<Vec<Hosts>>,
}

/// `--limit-mm-per-prompt`: most media of each kind, as vLLM writes it.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MediaCounts {
    image: Option<Count>,
    #[serde(default, rename = "video")]
    _video: Zero,
    #[serde(default, rename = "audio")]
    _audio: Zero,
}

impl MediaCounts {
    /// Most images of one request.
    pub fn images(&self) -> usize {
        self.given().unwrap_or(MediaLimits::default().max_images)
    }

    /// The same, if it is said.
    pub(crate) fn given(&self) -> Option<usize> {
        self.image.map(|count| match count {
            Count::Plain(count) | Count::Counted { count } => count,
        })
    }
}

/// `--mm-processor-kwargs`: how images are resized, where the model's files leave it open.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessorArgs {
    /// Most pixels of an image after resizing.
    pub max_pixels: Option<NonZeroUsize>,
}

/// A number, alone or in an object.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged, expecting = "a number or {\"count\": number} is expected")]
enum Count {
    Plain(usize),
    Counted { count: usize },
}

/// Of media that are not supported.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(try_from = "usize")]
struct Zero;

impl TryFrom<usize> for Zero {
    type Error = &'static str;

    fn try_from(count: usize) -> Result<Self, Self::Error> {
        match count {
            0 => Ok(Self),
            _ => Err("only images are supported: write 0 for video and audio, or leave them out"),
        }
    }
}

/// One host, or a list of them as JSON.
#[derive(Clone, Debug)]
struct Hosts(Vec<String>);

impl FromStr for Hosts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let list = match text.starts_with('[') && text.contains('"') || text == "[]" {
            true => json::<Vec<String>>(text)?,
            false => vec![text.to_owned()],
        };
        list.iter()
            .map(|one| host(one))
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

fn host(text: &str) -> Result<String, String> {
    let legal = |c: char| c.is_ascii_alphanumeric() || "-._[]:".contains(c);
    // An IPv6 address stands in brackets, as in an address of the web; others have no port.
    let has_port = text.contains(':') && !(text.starts_with('[') && text.ends_with(']'));
    match text.is_empty() || !text.chars().all(legal) || has_port {
        true => Err(format!(
            "`{text}` is not a host: write its name, such as upload.wikimedia.org, without scheme, port or path"
        )),
        false => Ok(text.trim_end_matches('.').to_ascii_lowercase()),
    }
}

impl MediaArgs {
    /// What the flags say, for requests of up to so many images.
    pub fn limits(&self, max_images: usize) -> MediaLimits {
        let hosts = self.allowed_media_domains.iter().flatten();
        MediaLimits {
            max_images,
            allowed_domains: hosts.flat_map(|hosts| hosts.0.iter().cloned()).collect(),
            ..MediaLimits::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[arg(long, value_parser = json::<MediaCounts>)]
        limit_mm_per_prompt: Option<MediaCounts>,
        #[command(flatten)]
        media: MediaArgs,
    }

    fn limits(words: &[&str]) -> Result<MediaLimits, String> {
        let cli = Cli::try_parse_from([&["x"], words].concat());
        cli.map(|cli| {
            cli.media
                .limits(cli.limit_mm_per_prompt.unwrap_or_default().images())
        })
        .map_err(|error| error.to_string())
    }

    #[test]
    fn values_are_vllms() {
        assert_eq!(limits(&[]).unwrap(), MediaLimits::default());
        for text in [r#"{"image": 4}"#, r#"{"image": {"count": 4}, "video": 0}"#] {
            assert_eq!(limits(&["--limit-mm-per-prompt", text]).unwrap().max_images, 4);
        }
        let hosts = [
            "--allowed-media-domains",
            "Upload.Wikimedia.org.",
            r#"["a.example", "[2606:4700::1]"]"#,
        ];
        let expected = ["upload.wikimedia.org", "a.example", "[2606:4700::1]"];
        assert_eq!(limits(&hosts).unwrap().allowed_domains, expected);
        for (words, named) in [
            (["--limit-mm-per-prompt", r#"{"image": -1}"#], "number"),
            (["--limit-mm-per-prompt", r#"{"images": 1}"#], "images"),
            (["--limit-mm-per-prompt", r#"{"video": 2}"#], "only images"),
            (["--allowed-media-domains", "https://a.example"], "without scheme"),
            (["--allowed-media-domains", "a.example:80"], "without scheme"),
            (["--allowed-media-domains", ""], "without scheme"),
        ] {
            let error = limits(&words).unwrap_err();
            assert!(error.contains(named), "{words:?}: {error}");
        }
    }
}
