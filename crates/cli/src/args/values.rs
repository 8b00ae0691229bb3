//! Values of flags, with what is wrong about them.

use std::num::{IntErrorKind, ParseIntError};
use std::str::FromStr;
use std::time::Duration;

use plimsoll_core::BlockSize;
use plimsoll_core::untrusted::with_plain_types;
use plimsoll_model::{MAX_RANKS, OnlineQuantization};
use plimsoll_profiler::MemFraction;
use reqwest::header::HeaderValue;
use serde::de::DeserializeOwned;

pub(crate) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("at least 1 is expected".to_owned()),
        Ok(value) => Ok(value),
        Err(error) => Err(no_number(&error, 1)),
    }
}

/// A number that may be 0.
pub(crate) fn whole<T: FromStr<Err = ParseIntError>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error| no_number(&error, 0))
}

/// Why a text is no number of 64 bits of at least `least`.
fn no_number(error: &ParseIntError, least: u64) -> String {
    match error.kind() {
        IntErrorKind::PosOverflow => format!("at most {} is expected", u64::MAX),
        _ => format!("a whole number of at least {least} is expected"),
    }
}

/// A TCP port; 0 is any free one.
pub(super) fn port(text: &str) -> Result<u16, String> {
    let expected = || format!("a number from 0 to {} is expected", u16::MAX);
    text.parse().map_err(|_| expected())
}

/// Ranks that serve a model together.
pub(super) fn ranks(text: &str) -> Result<usize, String> {
    let ranks = positive(text)?;
    match ranks <= MAX_RANKS {
        true => Ok(ranks),
        false => Err(format!("at most {MAX_RANKS} is expected")),
    }
}

pub(crate) fn ratio(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|r| (0.0..1.0).contains(r))
        .ok_or_else(|| "a number in [0, 1) is expected".to_owned())
}

pub(super) fn quantization(text: &str) -> Result<OnlineQuantization, String> {
    match text {
        "fp8" => Ok(OnlineQuantization::Fp8),
        _ => Err(
            "fp8 is expected; a model that is stored quantised says so itself: leave the flag out".to_owned(),
        ),
    }
}

/// Tokens, as vLLM counts them: `8k` is 8,000 and `8K` is 8,192.
pub(super) fn tokens(text: &str) -> Result<usize, String> {
    const UNITS: [(char, f64); 6] = [
        ('k', 1e3),
        ('m', 1e6),
        ('g', 1e9),
        ('K', 1024.0),
        ('M', 1048576.0),
        ('G', 1073741824.0),
    ];
    let unit = UNITS
        .iter()
        .find_map(|&(suffix, unit)| Some((text.strip_suffix(suffix)?, unit)));
    let count = match unit {
        None => match text.parse::<usize>() {
            Err(error) if *error.kind() == IntErrorKind::PosOverflow => return Err(no_number(&error, 1)),
            count => count.ok(),
        },
        Some((number, unit)) => number
            .parse::<f64>()
            .ok()
            .map(|number| number * unit)
            .filter(|count| (0.0..1e15).contains(count) && count.fract() == 0.0)
            .map(|count| count as usize),
    };
    match count {
        Some(0) => Err("at least 1 is expected".to_owned()),
        Some(count) => Ok(count),
        None => Err("a number of tokens is expected, such as 8192, 8k (8000) or 8K (8192)".to_owned()),
    }
}

/// Tokens of one request.
pub(super) fn context(text: &str) -> Result<usize, String> {
    const LEAST: usize = 2;
    match text {
        "auto" | "-1" => Err("leave the flag out: the length is decided at start".to_owned()),
        _ => match tokens(text)? {
            count @ LEAST.. => Ok(count),
            _ => Err(format!("at least {LEAST} is expected")),
        },
    }
}

/// A value that is JSON.
pub(crate) fn json<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|error| {
        if !error.is_data() {
            // The usual reason.
            return format!("this is not JSON ({error}); in a shell, put it between single quotes");
        }
        let said = error.to_string();
        let place = format!(" at line {} column {}", error.line(), error.column());
        with_plain_types(said.strip_suffix(&place).unwrap_or(&said))
    })
}

/// Origins of web pages: one, or a list of them as JSON, which vLLM takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origins(Vec<HeaderValue>);

impl Origins {
    /// As browsers send them, or `*`.
    pub fn all(&self) -> &[HeaderValue] {
        &self.0
    }
}

impl FromStr for Origins {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let list = match text.starts_with('[') {
            true => json::<Vec<String>>(text)?,
            false => vec![text.to_owned()],
        };
        list.iter()
            .map(|one| origin(one))
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

fn origin(text: &str) -> Result<HeaderValue, String> {
    let is_origin = match text.split_once("://") {
        Some((scheme, host)) => {
            // What browsers never send would never be equal to what they do.
            let legal = |c: char| !c.is_whitespace() && !c.is_ascii_uppercase() && !"/,?#@".contains(c);
            !scheme.is_empty() && !host.is_empty() && scheme.chars().chain(host.chars()).all(legal)
        }
        None => text == "*" || text == "null",
    };
    let value = is_origin.then(|| HeaderValue::from_str(text).ok()).flatten();
    value.ok_or_else(|| {
        format!("{text:?} is not an origin such as https://example.org: lower case, without a slash or path at the end")
    })
}

pub(super) fn block_size(text: &str) -> Result<BlockSize, String> {
    text.parse()
        .ok()
        .and_then(BlockSize::new)
        .ok_or_else(|| "8, 16 or 32 is expected".to_owned())
}

pub(super) fn fraction(text: &str) -> Result<MemFraction, String> {
    let fraction = text.parse().ok().and_then(MemFraction::new);
    fraction.ok_or_else(|| "a number above 0 and at most 1.0 is expected".to_owned())
}

/// A time that is not 0.
pub(super) fn some_time(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("a time above 0 is expected".to_owned()),
        time => Ok(time),
    }
}

/// Longest time a flag gives: clocks can still add it to now.
const MAX_DURATION: Duration = Duration::from_secs(366 * 24 * 3600);

pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    const UNITS: [(char, f64); 3] = [('s', 1.0), ('m', 60.0), ('h', 3600.0)];
    let with_unit = UNITS
        .iter()
        .find_map(|&(suffix, unit)| Some((text.strip_suffix(suffix)?, unit)));
    let (number, unit) = with_unit.unwrap_or((text, 1.0));
    number
        .parse::<f64>()
        .ok()
        .and_then(|number| Duration::try_from_secs_f64(number * unit).ok())
        .filter(|time| *time <= MAX_DURATION)
        .ok_or_else(|| "a time of at most a year is expected, such as 30, 30s, 8m or 1h".to_owned())
}

/// Longest time between two tokens that anybody would ask for.
const MAX_MILLISECONDS: f64 = 3_600_000.0;

/// A number of milliseconds above 0, such as 20 or 12.5.
pub(crate) fn milliseconds(text: &str) -> Result<Duration, String> {
    text.parse::<f64>()
        .ok()
        .filter(|number| *number > 0.0 && *number <= MAX_MILLISECONDS)
        .map(|number| Duration::from_secs_f64(number / 1e3))
        .filter(|time| !time.is_zero())
        .ok_or_else(|| {
            "a number of milliseconds above 0 and at most an hour is expected, such as 20 or 12.5".to_owned()
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_json_is_said_in_its_own_terms() {
        #[derive(Debug, serde::Deserialize)]
        struct Options {
            #[serde(rename = "count")]
            _count: u32,
        }
        let said = |text: &str| json::<Options>(text).unwrap_err();
        assert!(json::<Options>(r#"{"count": 3}"#).is_ok());
        assert_eq!(said("5"), "invalid type: integer `5`, expected an object");
        let wrong = said(r#"{"count": "x"}"#);
        assert_eq!(wrong, "invalid type: string \"x\", expected a whole number");
        // What a shell leaves of {"count": 3}.
        assert!(said("{count: 3}").contains("single quotes"));
    }

    #[test]
    fn a_number_that_is_too_large_is_a_number() {
        let long = "99999999999999999999";
        let most = "at most 18446744073709551615 is expected";
        let all = [
            positive(long),
            whole(long),
            tokens(long),
            whole::<u64>(long).map(|_| 0),
        ];
        for said in all {
            assert_eq!(said.unwrap_err(), most);
        }
        assert_eq!(
            positive("x").unwrap_err(),
            "a whole number of at least 1 is expected"
        );
        assert_eq!(
            whole::<u64>("-1").unwrap_err(),
            "a whole number of at least 0 is expected"
        );
    }

    #[test]
    fn tokens_are_counted_as_vllm_counts_them() {
        for (text, count) in [
            ("1", 1),
            ("8192", 8192),
            ("32k", 32_000),
            ("32K", 32_768),
            ("25.6k", 25_600),
            ("1M", 1 << 20),
            ("1m", 1_000_000),
        ] {
            assert_eq!(tokens(text), Ok(count), "{text}");
        }
        for wrong in [
            "", "k", "0", "0k", "-1", "1.5", "1.0001k", "infk", "nank", "1e30k", "8 k", "8kb",
        ] {
            assert!(tokens(wrong).is_err(), "{wrong}");
        }
        for left_to_us in ["auto", "-1"] {
            assert!(context(left_to_us).unwrap_err().contains("leave the flag out"));
        }
        assert_eq!(context("4k"), Ok(4000));
        assert_eq!(context("2"), Ok(2));
        assert!(context("1").unwrap_err().contains("at least 2"));
    }

    #[test]
    fn origins_are_those_that_browsers_send() {
        let all = |text: &str| text.parse::<Origins>().map(|origins| origins.all().to_vec());
        for one in [
            "*",
            "null",
            "https://a.example",
            "http://localhost:3000",
            "http://[::1]:8000",
            "app://x",
        ] {
            assert_eq!(all(one), Ok(vec![HeaderValue::from_str(one).unwrap()]));
        }
        assert_eq!(all(r#"["*"]"#).unwrap(), ["*"]);
        let two = all(r#"["https://a", "https://b"]"#).unwrap();
        assert_eq!(two, ["https://a", "https://b"]);
        for wrong in [
            "",
            "example.org",
            "https://",
            "https://a/",
            "https://a/x",
            "https://a,https://b",
            "https://A.example",
            "https://a b",
            "[\"*\"",
            "[1]",
        ] {
            assert!(all(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times() {
        for (text, seconds) in [
            ("0", 0.0),
            ("1.5", 1.5),
            ("30s", 30.0),
            ("8m", 480.0),
            ("1h", 3600.0),
            ("8784h", 366.0 * 86400.0),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_secs_f64(seconds)), "{text}");
        }
        for wrong in ["", "s", "-1", "1d", "nan", "inf", "1e300h", "1e19", "8785h"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
