use aho_corasick::{AhoCorasick, MatchKind};

/// The texts of a vocabulary's special tokens.
#[derive(Debug)]
pub(crate) struct SpecialTexts(Option<AhoCorasick>);

impl SpecialTexts {
    /// `texts` may be empty.
    pub(crate) fn new<'a>(texts: impl Iterator<Item = &'a [u8]>) -> Self {
        // A text of one character has no room for a guard, and is no markup.
        let texts =
            texts.filter(|text| std::str::from_utf8(text).is_ok_and(|text| text.chars().nth(1).is_some()));
        let found = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(texts);
        Self(found.ok())
    }

    /// Where they occur, from left to right, without overlaps.
    pub(crate) fn find<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (usize, usize)> + 'a {
        let found = self.0.iter().flat_map(move |all| all.find_iter(text));
        found.map(|found| (found.start(), found.end()))
    }
}
