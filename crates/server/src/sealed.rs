//! Reasoning as an opaque string (`encrypted_content`, `signature`), for clients that send it back instead of plain text. It
//! is encoded, not encrypted.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Prefix of this server's strings; others are ignored.
const MARK: &str = "plimsoll1:";

/// The string that stands for `reasoning`.
pub(crate) fn seal(reasoning: &str) -> String {
    format!("{MARK}{}", STANDARD.encode(reasoning))
}

/// The reasoning in `sealed`, unless another server made it.
pub(crate) fn open(sealed: &str) -> Option<String> {
    let bytes = STANDARD.decode(sealed.strip_prefix(MARK)?).ok()?;
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_only_its_own_strings() {
        for reasoning in ["", "2 + 2 ≠ 5\n"] {
            assert_eq!(open(&seal(reasoning)).as_deref(), Some(reasoning));
        }
        assert_eq!(open("gAAAAABo"), None);
        assert_eq!(open("plimsoll1:*"), None);
        assert_eq!(open(&format!("{MARK}{}", STANDARD.encode([0xff]))), None);
    }
}
