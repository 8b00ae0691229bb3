//! Images of the dataset `random-mm`, under vLLM's names.

use std::str::FromStr;

use clap::{Args, ValueEnum};
use rand::Rng;
use rand::rngs::StdRng;

use crate::args::{MediaCounts, json};
use crate::error::Error;
use crate::picture::{Format, Picture, Size};

/// `--dataset-name`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum DatasetName {
    /// Random tokens of given lengths.
    #[default]
    Random,
    /// The same with images; over HTTP, texts of about these lengths.
    RandomMm,
}

/// Which dataset, and the images of `random-mm`.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct DatasetArgs {
    /// Dataset: random (random tokens of the lengths that flags say), or random-mm (images too; `bench serve` sends chats of texts of
    /// about these lengths)
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "NAME",
        hide_possible_values = true
    )]
    pub(super) dataset_name: DatasetName,
    /// With random-mm, mean number of images of a request [default: 1]
    #[arg(long, value_name = "N")]
    random_mm_base_items_per_request: Option<usize>,
    /// With random-mm, fraction by which that number varies around its mean, in [0, 1] [default: 0]
    #[arg(long, value_name = "RATIO", value_parser = fraction)]
    random_mm_num_mm_items_range_ratio: Option<f64>,
    /// With random-mm, most images of a request, such as {"image": 3} [default: {"image": 255}]
    #[arg(long, value_name = "JSON", value_parser = json::<MediaCounts>)]
    random_mm_limit_mm_per_prompt: Option<MediaCounts>,
    /// With random-mm, sizes of images and how probable they are, {(height, width, 1): probability, ..}
    /// [default: {(256, 256, 1): 0.5, (720, 1280, 1): 0.5}]
    #[arg(long, value_name = "DICT")]
    random_mm_bucket_config: Option<Buckets>,
}

/// vLLM's defaults.
const MOST: usize = 255;
const SIZES: &str = "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}";

fn fraction(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|r| (0.0..=1.0).contains(r))
        .ok_or_else(|| "a number in [0, 1] is expected".to_owned())
}

impl DatasetArgs {
    /// An error if one of the flags was given: they are for another dataset.
    fn refuse(&self) -> Result<(), Error> {
        let given = [
            (
                "base-items-per-request",
                self.random_mm_base_items_per_request.is_some(),
            ),
            (
                "num-mm-items-range-ratio",
                self.random_mm_num_mm_items_range_ratio.is_some(),
            ),
            (
                "limit-mm-per-prompt",
                self.random_mm_limit_mm_per_prompt.is_some(),
            ),
            ("bucket-config", self.random_mm_bucket_config.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            None => Ok(()),
            Some((name, _)) => Err(Error::configuration(
                format!("--random-mm-{name}"),
                "it is for images of requests: add --dataset-name random-mm",
            )),
        }
    }

    /// What images requests have, if the dataset has any.
    ///
    /// # Errors
    /// Where flags contradict each other, or are for the other dataset.
    pub(super) fn images(&self) -> Result<Option<Images>, Error> {
        match self.dataset_name {
            DatasetName::Random => self.refuse().map(|()| None),
            DatasetName::RandomMm => self.random_images().map(Some),
        }
    }

    fn random_images(&self) -> Result<Images, Error> {
        let mean = self.random_mm_base_items_per_request.unwrap_or(1) as f64;
        let ratio = self.random_mm_num_mm_items_range_ratio.unwrap_or(0.0);
        let limit = self.random_mm_limit_mm_per_prompt.and_then(|limit| limit.given());
        let (least, most) = (
            (mean * (1.0 - ratio)).floor() as usize,
            ((mean * (1.0 + ratio)).ceil() as usize).min(limit.unwrap_or(MOST)),
        );
        if least > most {
            return Err(Error::configuration(
                "--random-mm-limit-mm-per-prompt",
                format!("at most {most} images of a request, but each is to have at least {least}"),
            ));
        }
        let buckets = match &self.random_mm_bucket_config {
            Some(buckets) => buckets.clone(),
            None => SIZES.parse().map_err(Error::Internal)?,
        };
        Ok(Images { least, most, buckets })
    }
}

/// Images of requests.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Images {
    /// Fewest and most of one request.
    least: usize,
    most: usize,
    buckets: Buckets,
}

impl Images {
    /// Those of one request: noise in JPEG files.
    pub(super) fn draw(&self, rng: &mut StdRng) -> Vec<Picture> {
        let count = rng.random_range(self.least..=self.most);
        let picture = |_| Picture {
            size: self.buckets.draw(rng),
            seed: rng.random(),
            format: Format::Jpeg,
            grain: 1,
        };
        (0..count).map(picture).collect()
    }
}

/// `--random-mm-bucket-config`: sizes with weights, which are above 0.
#[derive(Clone, Debug, PartialEq)]
struct Buckets(Vec<(Size, f64)>);

impl Buckets {
    fn draw(&self, rng: &mut StdRng) -> Size {
        let total: f64 = self.0.iter().map(|(_, weight)| weight).sum();
        let mut left = rng.random_range(0.0..total);
        let found = self.0.iter().find(|(_, weight)| {
            left -= weight;
            left < 0.0
        });
        found.or(self.0.last()).expect("a bucket").0
    }
}

impl FromStr for Buckets {
    type Err = String;

    /// A dictionary as Python writes it; keys may stand in quotes, as in JSON.
    fn from_str(text: &str) -> Result<Self, String> {
        let expected =
            || "a dictionary is expected, such as {(256, 256, 1): 0.5, (720, 1280, 1): 0.5}".to_owned();
        let text = text.replace(['"', '\''], "");
        let inner = text
            .trim()
            .strip_prefix('{')
            .and_then(|text| text.strip_suffix('}'));
        let mut rest = inner.ok_or_else(expected)?.trim();
        let mut buckets = Vec::new();
        while !rest.is_empty() {
            let (key, after) = rest
                .strip_prefix('(')
                .and_then(|rest| rest.split_once(')'))
                .ok_or_else(expected)?;
            let after = after.trim_start().strip_prefix(':').ok_or_else(expected)?;
            let (weight, after) = after.split_once(',').unwrap_or((after, ""));
            rest = after.trim();
            let numbers: Result<Vec<usize>, _> = key.split(',').map(|side| side.trim().parse()).collect();
            let weight: f64 = weight.trim().parse().map_err(|_| expected())?;
            let &[height, width, frames] = &numbers.map_err(|_| expected())?[..] else {
                return Err(expected());
            };
            if !weight.is_finite() || weight < 0.0 {
                return Err(format!(
                    "({key}) has the probability {weight}; none may be below 0"
                ));
            }
            if weight == 0.0 {
                continue;
            }
            if frames != 1 {
                return Err(format!(
                    "({key}) is a video or a sound, of which {frames} is the number of frames or channels; only images, \
                     (height, width, 1), are supported"
                ));
            }
            let sides = 1..=usize::from(u16::MAX);
            if !sides.contains(&height) || !sides.contains(&width) {
                return Err(format!("({key}): sides of images have 1 to 65535 pixels"));
            }
            buckets.push((Size { width, height }, weight));
        }
        match buckets.is_empty() {
            true => Err("at least one size must have a probability above 0".to_owned()),
            false => Ok(Self(buckets)),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use rand::SeedableRng;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        dataset: DatasetArgs,
    }

    fn args(words: &[&str]) -> Result<DatasetArgs, String> {
        let cli = Cli::try_parse_from([&["x"], words].concat());
        cli.map(|cli| cli.dataset).map_err(|error| error.to_string())
    }

    #[test]
    fn sizes_are_written_as_python_and_json_do() {
        let size = |width, height| Size { width, height };
        let expected = Buckets(vec![(size(256, 256), 0.25), (size(1280, 720), 0.75)]);
        for text in [
            "{(256, 256, 1): 0.25, (720, 1280, 1): 0.75}",
            "{ (256,256,1):0.25,(720,1280,1):.75, }",
            r#"{"(256, 256, 1)": 0.25, "(720, 1280, 1)": 0.75}"#,
            "{(256, 256, 1): 0.25, (720, 1280, 1): 0.75, (720, 1280, 16): 0.0}",
        ] {
            assert_eq!(text.parse(), Ok(expected.clone()), "{text}");
        }
        for (text, named) in [
            ("", "a dictionary"),
            ("{}", "at least one size"),
            ("{(256, 256, 1): 0}", "at least one size"),
            ("{(256, 256): 1}", "a dictionary"),
            ("{(256, 256, 1) 1}", "a dictionary"),
            ("{(256, 256, 1): one}", "a dictionary"),
            ("{(256, 256, 1): -1}", "below 0"),
            ("{(256, 256, 16): 1}", "only images"),
            ("{(0, 1, 5): 1}", "only images"),
            ("{(0, 256, 1): 1}", "1 to 65535"),
            ("{(1, 65536, 1): 1}", "1 to 65535"),
        ] {
            let error = text.parse::<Buckets>().unwrap_err();
            assert!(error.contains(named), "{text}: {error}");
        }
    }

    #[test]
    fn numbers_and_sizes_are_drawn_as_asked() {
        let flags = [
            "--random-mm-base-items-per-request",
            "4",
            "--random-mm-num-mm-items-range-ratio",
            "0.5",
            "--random-mm-limit-mm-per-prompt",
            r#"{"image": 5, "video": 0}"#,
            "--random-mm-bucket-config",
            "{(1, 2, 1): 1, (3, 4, 1): 3}",
        ];
        let images = args(&flags).unwrap().random_images().unwrap();
        assert_eq!((images.least, images.most), (2, 5));
        let mut rng = StdRng::seed_from_u64(1);
        let drawn: Vec<_> = (0..400).map(|_| images.draw(&mut rng)).collect();
        assert!((2..=5).all(|count| drawn.iter().any(|images| images.len() == count)));
        let all: Vec<_> = drawn.concat();
        let small = all.iter().filter(|image| image.size.height == 1).count() as f64;
        assert!(
            (small / all.len() as f64 - 0.25).abs() < 0.05,
            "{small} of {}",
            all.len()
        );
        let default = args(&[]).unwrap();
        assert!(default.refuse().is_ok());
        assert_eq!(default.random_images().unwrap().draw(&mut rng).len(), 1);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for pair in flags_and_values() {
            let error = args(&pair).unwrap().refuse().unwrap_err().to_string();
            assert!(error.contains(pair[0]) && error.contains("random-mm"), "{error}");
        }
        let few = args(&[
            "--random-mm-base-items-per-request",
            "3",
            "--random-mm-limit-mm-per-prompt",
            r#"{"image": 2}"#,
        ]);
        assert!(
            few.unwrap()
                .random_images()
                .unwrap_err()
                .to_string()
                .contains("at least 3")
        );
        assert!(args(&["--random-mm-num-mm-items-range-ratio", "1.1"]).is_err());
        assert!(args(&["--random-mm-limit-mm-per-prompt", r#"{"video": 1}"#]).is_err());
    }

    fn flags_and_values() -> [[&'static str; 2]; 4] {
        [
            ["--random-mm-base-items-per-request", "2"],
            ["--random-mm-num-mm-items-range-ratio", "0"],
            ["--random-mm-limit-mm-per-prompt", "{}"],
            ["--random-mm-bucket-config", "{(1, 1, 1): 1}"],
        ]
    }
}
