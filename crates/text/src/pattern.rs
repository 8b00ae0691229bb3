//! Regular expressions of tokenizers. They come with models, and the engine that runs them backtracks: here each match has a bound
//! of steps, and all matches in a text a bound of time, where the `tokenizers` crate has none and panics.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onig::{MatchParam, Regex, Region, SearchOptions};
use tokenizers::Offsets;
use tokenizers::tokenizer::pattern::Pattern as Matcher;

/// What all regular expressions may take for one text; those that are published split 5 MB a second or more.
pub(crate) const MAX_TIME: Duration = Duration::from_secs(10);
/// Backtracking steps of a match at one place: some times the text, as in a long row of spaces that no line break ends.
const STEPS_PER_BYTE: usize = 8;
const MIN_STEPS: usize = 100_000;
const MAX_STEPS: usize = 10_000_000;
/// Steps at one place while the engine looks for the next match by itself, without looking at the clock: so many for all places
/// together, and no more than so many for each. Nearly all words need fewer.
const SEARCH_STEPS: usize = 1_000_000_000;
const MAX_SEARCH_STEPS: usize = 10_000;

/// A regular expression of a tokenizer, which knows its field.
#[derive(Clone)]
pub(crate) struct Pattern(Arc<Named>);

struct Named {
    regex: Regex,
    source: String,
    field: String,
}

/// A [`Pattern`] until a point in time.
pub(crate) struct Until<'a> {
    pattern: &'a Named,
    end: Instant,
}

/// A regular expression that exceeded a bound.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("the regular expression `{0}` of the tokenizer takes too long")]
pub(crate) struct TooLong(String);

impl Pattern {
    /// `field` is its place in a tokenizer.json.
    pub(crate) fn new(source: &str, field: &str) -> Result<Self, onig::Error> {
        Ok(Self(Arc::new(Named {
            regex: Regex::new(source)?,
            source: source.to_owned(),
            field: field.to_owned(),
        })))
    }

    /// To find matches, until `end`.
    pub(crate) fn until(&self, end: Instant) -> Until<'_> {
        Until {
            pattern: &self.0,
            end,
        }
    }

    /// Finds the time that grows faster than a text, by rows of each character that it names and of some others.
    pub(crate) fn try_out(&self) -> Result<(), TooLong> {
        const REPEATED: usize = 2048;
        const OTHERS: &str = "aA1 \n\r\t!é漢'";
        let named = self.0.source.chars().filter(|c| !c.is_control()).take(256);
        let repeated: BTreeSet<char> = named.clone().chain(OTHERS.chars()).collect();
        // The engine skips a text without a character that every match has.
        let tail: String = named.chain(OTHERS.chars()).collect();
        let end = Instant::now() + MAX_TIME / 2;
        for c in repeated {
            for last in ['x', '!', '\n'] {
                let row = std::iter::repeat_n(c, REPEATED);
                let text: String = row.chain([last]).chain(tail.chars()).collect();
                self.0.matches(&text, end)?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pattern").field(&self.0.source).finish()
    }
}

impl Named {
    /// All matches, as [`Regex::find_iter`] finds them.
    fn matches(&self, text: &str, end: Instant) -> Result<Vec<Offsets>, TooLong> {
        let mut matches: Vec<Offsets> = Vec::new();
        let mut region = Region::new();
        let mut from = 0;
        while from <= text.len() {
            let Some(found) = self.next(text, from, &mut region, end)? else {
                break;
            };
            let (first, last) = found;
            let is_empty_after_one =
                first == last && matches.last().is_some_and(|&(_, before)| before == last);
            if is_empty_after_one {
                from += text[from..].chars().next().map_or(1, char::len_utf8);
            } else {
                matches.push(found);
                from = last;
            }
        }
        Ok(matches)
    }

    /// The first match that begins at `from` or later; `region` is scratch.
    fn next(
        &self,
        text: &str,
        from: usize,
        region: &mut Region,
        end: Instant,
    ) -> Result<Option<Offsets>, TooLong> {
        const OPTIONS: SearchOptions = SearchOptions::SEARCH_OPTION_NONE;
        let few = (SEARCH_STEPS / text.len().max(1)).min(MAX_SEARCH_STEPS);
        region.clear();
        let found =
            self.regex
                .search_with_param(text, from, text.len(), OPTIONS, Some(&mut *region), limit(few));
        self.check(end)?;
        if let Ok(place) = found {
            return Ok(place.and_then(|_| region.pos(0)));
        }
        // Step by step: with more steps for each place, and the clock in view.
        let steps = (STEPS_PER_BYTE * text.len()).clamp(MIN_STEPS, MAX_STEPS);
        let places = text[from..].char_indices().map(|(at, _)| from + at);
        for place in places.chain([text.len()]) {
            region.clear();
            let length = self
                .regex
                .match_with_param(text, place, OPTIONS, Some(&mut *region), limit(steps));
            self.check(end)?;
            if length.map_err(|_| self.too_long())?.is_some() {
                return Ok(region.pos(0));
            }
        }
        Ok(None)
    }

    fn check(&self, end: Instant) -> Result<(), TooLong> {
        match Instant::now() > end {
            true => Err(self.too_long()),
            false => Ok(()),
        }
    }

    fn too_long(&self) -> TooLong {
        TooLong(self.field.clone())
    }
}

fn limit(steps: usize) -> MatchParam {
    let mut limit = MatchParam::default();
    // 0 would be none.
    limit.set_retry_limit_in_match(steps.max(1) as u32);
    limit
}

impl Matcher for Until<'_> {
    fn find_matches(&self, inside: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        if inside.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        let mut pieces = Vec::new();
        let mut done = 0;
        for (first, last) in self.pattern.matches(inside, self.end)? {
            if done != first {
                pieces.push(((done, first), false));
            }
            pieces.push(((first, last), true));
            done = last;
        }
        if done != inside.len() {
            pieces.push(((done, inside.len()), false));
        }
        Ok(pieces)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pattern(source: &str) -> Pattern {
        Pattern::new(source, "pre_tokenizer.pattern.Regex").unwrap()
    }

    fn soon() -> Instant {
        Instant::now() + MAX_TIME
    }

    #[test]
    fn growth_that_is_not_linear_is_found() {
        let slow = [
            "(a+)+$",
            r"a*a*a*b",
            r"(\s|\n)*\d",
            "(x+x+)+y",
            r"(?:.*,)*;",
            r"\p{L}*\p{L}*\p{L}*\d",
            "(Z|Z)*Y",
        ];
        for source in slow {
            let error = pattern(source).try_out().expect_err(source);
            assert!(
                error.to_string().contains("`pre_tokenizer.pattern.Regex`"),
                "{source}: {error}"
            );
        }
        let linear = [
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\s*[\r\n]+|\s+",
            r"\d{1,3}(?=(?:\d{3})*\b)",
            " {2,}",
        ];
        for source in linear {
            assert_eq!(pattern(source).try_out(), Ok(()), "{source}");
        }
    }

    #[test]
    fn time_that_is_over_ends_a_search() {
        let text = "a".repeat(1000);
        let passed = Instant::now() - Duration::from_secs(1);
        assert!(pattern("a").until(passed).find_matches(&text).is_err());
        assert!(pattern("a").until(soon()).find_matches(&text).is_ok());
    }

    #[test]
    fn a_match_may_need_as_many_steps_as_a_text_has_bytes() {
        let spaces = " ".repeat(50_000);
        let text = format!("a{spaces}b{spaces}");
        let pieces = pattern(r"\s*[\r\n]+|\s+(?!\S)|\s+|\w")
            .until(soon())
            .find_matches(&text)
            .unwrap();
        let ends: Vec<_> = pieces.iter().map(|((_, end), _)| *end).collect();
        assert_eq!(ends, [1, 50_000, 50_001, 50_002, 100_002]);
    }

    proptest! {
        #[test]
        fn matches_are_those_of_the_tokenizers_crate(
            source in prop::sample::select(vec![
                r"\s+(?!\S)|\s+| ?\p{L}+|\d{1,3}", "x*", "", r"\b", "(?<=a)b", "a|ab", r"\Gx", "^x|x$", r"(?m)^.", "é+", "[^x]{70}", "[^\\n]+|\\n+",
            ]),
            text in "[ab xé1\n]{0,300}",
        ) {
            let own = pattern(source).until(soon()).find_matches(&text).unwrap();
            let theirs = tokenizers::utils::SysRegex::new(source).unwrap();
            prop_assert_eq!(own, (&theirs).find_matches(&text).unwrap());
        }
    }
}
