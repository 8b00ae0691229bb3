//! Byte sizes as people write them.

use std::fmt;
use std::str::FromStr;

use plimsoll_core::human_bytes;

/// A number of bytes; parses `1073741824`, `512MiB`, `1.5GiB`, `2GB`, `800k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

const UNITS: [(&str, u64); 13] = [
    ("tib", 1 << 40),
    ("gib", 1 << 30),
    ("mib", 1 << 20),
    ("kib", 1 << 10),
    ("tb", 1_000_000_000_000),
    ("gb", 1_000_000_000),
    ("mb", 1_000_000),
    ("kb", 1_000),
    // A bare letter means what `free -h` and Docker mean by it.
    ("t", 1 << 40),
    ("g", 1 << 30),
    ("m", 1 << 20),
    ("k", 1 << 10),
    ("b", 1),
];

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let lower = text.trim().to_ascii_lowercase();
        let (number, unit) = UNITS
            .iter()
            .find_map(|&(suffix, unit)| lower.strip_suffix(suffix).map(|number| (number.trim_end(), unit)))
            .unwrap_or((&lower, 1));
        if let Ok(whole) = number.parse::<u64>() {
            return whole
                .checked_mul(unit)
                .map(Self)
                .ok_or_else(|| format!("{text} is too large"));
        }
        match number.parse::<f64>() {
            Ok(value) if value >= 0.0 && value * (unit as f64) < 9e18 => {
                Ok(Self((value * unit as f64) as u64))
            }
            _ => Err("a number of bytes is expected, such as 8589934592, 8GiB or 512MiB".to_owned()),
        }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&human_bytes(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        let cases = [
            ("0", 0),
            ("1073741824", 1 << 30),
            ("8GiB", 8 << 30),
            ("8g", 8 << 30),
            ("1.5 GiB", 3 << 29),
            ("2GB", 2_000_000_000),
            ("512MiB", 512 << 20),
            ("800k", 800 << 10),
            ("7B", 7),
        ];
        for (text, bytes) in cases {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for wrong in [
            "",
            "GiB",
            "-1",
            "1e999",
            "nan",
            "inf",
            "8 apples",
            "99999999999TiB",
        ] {
            assert!(wrong.parse::<Bytes>().is_err(), "{wrong}");
        }
    }
}
