//! Values of flags, with what is wrong about them.

use std::time::Duration;

use plimsoll_core::BlockSize;
use plimsoll_profiler::MemFraction;
use reqwest::header::HeaderValue;
use serde::de::DeserializeOwned;

pub(crate) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".to_owned()),
        Ok(value) => Ok(value),
        Err(_) => Err("a whole number is expected".to_owned()),
    }
}

pub(super) fn json<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

pub(super) fn origin(text: &str) -> Result<HeaderValue, String> {
    HeaderValue::from_str(text).map_err(|_| "an origin such as https://example.org is expected".to_owned())
}

pub(super) fn block_size(text: &str) -> Result<BlockSize, String> {
    text.parse()
        .ok()
        .and_then(BlockSize::new)
        .ok_or_else(|| "a block holds 8, 16 or 32 tokens".to_owned())
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

#[cfg(test)]
mod tests {
    use super::*;

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
