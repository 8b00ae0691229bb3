//! Finds what a text asks the simulated model to say.

use plimsoll_core::TokenId;

const OPEN: &[u8] = b"<say>";
const CLOSE: &[u8] = b"</say>";

/// A search for `<say>..</say>` that goes on with each token; a token below 256 is a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quote {
    /// Tokens so far.
    len: u32,
    /// Bytes of the mark that is looked for which the text ends with.
    matched: u8,
    /// Where the text after `<say>` begins.
    open: Option<u32>,
    /// The last whole quote.
    pub(crate) last: Option<Span>,
}

/// Positions of a quote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: u32,
    pub(crate) end: u32,
}

impl Quote {
    pub(crate) const NONE: Self = Self {
        len: 0,
        matched: 0,
        open: None,
        last: None,
    };

    pub(crate) fn then(mut self, token: TokenId) -> Self {
        self.len += 1;
        let mark = if self.open.is_none() { OPEN } else { CLOSE };
        // `<` is the first byte of both marks and stands nowhere else in them.
        self.matched = match u8::try_from(token) {
            Ok(byte) if byte == mark[usize::from(self.matched)] => self.matched + 1,
            Ok(b'<') => 1,
            _ => 0,
        };
        if usize::from(self.matched) == mark.len() {
            self.matched = 0;
            match self.open.take() {
                None => self.open = Some(self.len),
                Some(start) => {
                    self.last = Some(Span {
                        start,
                        end: self.len - CLOSE.len() as u32,
                    });
                }
            }
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(text: &str) -> Option<&str> {
        let quote = text
            .bytes()
            .fold(Quote::NONE, |quote, byte| quote.then(byte.into()));
        quote
            .last
            .map(|span| &text[span.start as usize..span.end as usize])
    }

    #[test]
    fn the_last_whole_quote_is_found() {
        assert_eq!(last("a <say>b</say> c"), Some("b"));
        assert_eq!(last("<say>a</say><<say>b < </s</say>, <say>"), Some("b < </s"));
        assert_eq!(last("<say></say>"), Some(""));
        assert_eq!(last("<say>a<say>b</say>"), Some("a<say>b"));
        assert_eq!(last("say </say> <say>"), None);
    }
}
