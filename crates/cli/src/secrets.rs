//! Flags whose values are shown nowhere.

const SECRETS: [&str; 2] = ["api-key", "hf-token"];

/// Whether the value of the flag `name`, without dashes, is shown nowhere.
pub(crate) fn is_secret(name: &str) -> bool {
    SECRETS.contains(&name)
}

/// The words of a command line, with `***` for secret values.
pub(crate) fn hidden(words: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut shown = Vec::new();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let Some(name) = secret(&word) else {
            shown.push(word);
            continue;
        };
        shown.push(format!("--{name}=***"));
        if !word.contains('=') {
            words.next();
        }
    }
    shown
}

/// Name of the secret flag that `word` is.
fn secret(word: &str) -> Option<String> {
    let name = word.strip_prefix("--")?.split('=').next()?.replace('_', "-");
    is_secret(&name).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_shown() {
        let line = "plimsoll chat --hf_token a --api-key=b --seed 1 -- --api-key c";
        assert_eq!(
            hidden(line.split(' ').map(str::to_owned)).join(" "),
            "plimsoll chat --hf-token=*** --api-key=*** --seed 1 -- --api-key=***"
        );
    }
}
