//! What errors about unknown fields tell people to do.

use serde_json::Value;

/// Most unknown fields of which an error names all.
const MOST_LISTED: usize = 8;

/// Names of any length, or that a shell would read, are not for a message that people paste.
pub(super) fn are_listed(names: &[&str]) -> bool {
    let is_plain = |name: &&str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    names.len() <= MOST_LISTED && names.iter().all(is_plain)
}

/// A message about fields that are not known, and how to go on without them, if their names can be pasted.
pub(super) fn with_removal(message: String, names: &[&str], overrides: &Value) -> String {
    match are_listed(names) {
        true => format!("{message}. Remove what has no effect with --hf-overrides '{overrides}'"),
        false => message,
    }
}
