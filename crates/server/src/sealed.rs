//! Reasoning as an opaque string: what clients that keep no plain reasoning send back (`encrypted_content`, `signature`).
//! It hides nothing from anybody; it only has to come back unchanged.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// How a string of this server's begins; those of other servers are told by its absence.
const MARK: &str = "plimsoll1:";

/// The string that stands for `reasoning`.
pub(crate) fn seal(reasoning: &str) -> String {
    format!("{MARK}{}", STANDARD.encode(reasoning))
}

/// What `sealed` stands for, unless another server made it.
pub(crate) fn open(sealed: &str) -> Option<String> {
    let bytes = STANDARD.decode(sealed.strip_prefix(MARK)?).ok()?;
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_its_own_alone() {
        for reasoning in ["", "2 + 2 ≠ 5\n"] {
            assert_eq!(open(&seal(reasoning)).as_deref(), Some(reasoning));
        }
        assert_eq!(open("gAAAAABo"), None);
        assert_eq!(open("plimsoll1:*"), None);
        assert_eq!(open(&format!("{MARK}{}", STANDARD.encode([0xff]))), None);
    }
}
