//! Images within requests.

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

/// Padding may be missing, as in many clients' URLs.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Whether the address is a data URL.
pub(super) fn is_one(url: &str) -> bool {
    url.get(..5)
        .is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"))
}

/// The bytes of `data:image/...;base64,...`.
pub(super) fn decode(url: &str) -> Result<Vec<u8>, String> {
    let rest = url.get(5..).unwrap_or_default();
    let (kind, data) = rest
        .split_once(',')
        .ok_or("the data URL has no comma before its data")?;
    let mut parts = kind.split(';');
    let media_type = parts.next().unwrap_or_default().trim().to_ascii_lowercase();
    if !media_type.is_empty() && !media_type.starts_with("image/") && media_type != "application/octet-stream"
    {
        let shown: String = media_type.chars().take(100).collect();
        return Err(format!("the data URL holds `{shown}`, not an image"));
    }
    if !parts.any(|part| part.trim().eq_ignore_ascii_case("base64")) {
        return Err("the data URL must be in base64: `data:image/png;base64,...`".to_owned());
    }
    let decoded = match data.bytes().any(|byte| byte.is_ascii_whitespace()) {
        false => BASE64.decode(data),
        // Lines, as some tools break base64.
        true => BASE64.decode(data.split_ascii_whitespace().collect::<String>()),
    };
    decoded.map_err(|error| format!("the data URL is not valid base64: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_urls_are_decoded_or_refused() {
        for url in [
            "data:image/png;base64,aGk=",
            "data:image/png;base64,aGk",
            "DATA:IMAGE/PNG;charset=x;BASE64,aGk=",
            "data:;base64,aGk=",
            "data:image/jpeg;base64,aG\nk=\r\n",
        ] {
            assert!(is_one(url));
            assert_eq!(decode(url).as_deref(), Ok(&b"hi"[..]), "{url}");
        }
        for (url, why) in [
            ("data:image/png;base64", "no comma"),
            ("data:image/png,hi", "must be in base64"),
            ("data:text/html;base64,aGk=", "holds `text/html`"),
            ("data:video/mp4;base64,aGk=", "holds `video/mp4`"),
            ("data:image/png;base64,a*k=", "not valid base64"),
        ] {
            let error = decode(url).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert!(!is_one("https://example.com/data:"));
        assert!(!is_one("dat"));
    }
}
