use std::sync::Arc;

use crate::TextError;

/// Finds stop strings in a stream of text, and holds back what may be the start of one.
///
/// The match is the one that is complete first; of several complete at the same byte, the longest. So the result does not
/// depend on how the text is cut into pieces. One Knuth-Morris-Pratt automaton per stop string: linear time whatever the
/// strings.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<Automaton>,
    include_stop: bool,
    /// Text not yet given out: the longest suffix of the input that starts some stop string.
    held: String,
    stopped: bool,
}

/// What [`StopMatcher::push`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scanned {
    /// Text that is certain to come before any stop string (after a match with `include_stop`, ends with it).
    pub text: String,
    /// Index of the stop string that was found; no more text is returned after it.
    pub stop: Option<usize>,
}

impl StopMatcher {
    /// Looks for `stops`; `include_stop` keeps the one found in the text.
    pub fn new(stops: &[String], include_stop: bool) -> Result<Self, TextError> {
        if stops.iter().any(String::is_empty) {
            return Err(TextError::EmptyStop);
        }
        let stops = stops.iter().map(|stop| Automaton::new(stop.as_bytes())).collect();
        Ok(Self {
            stops,
            include_stop,
            held: String::new(),
            stopped: false,
        })
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, text: &str) -> Scanned {
        if self.stopped {
            return Scanned {
                text: String::new(),
                stop: None,
            };
        }
        let scanned_before = self.held.len();
        self.held.push_str(text);
        for (i, &byte) in text.as_bytes().iter().enumerate() {
            let found = (self.stops.iter_mut().enumerate())
                .filter_map(|(index, stop)| stop.advance(byte).then_some((stop.pattern.len(), index)))
                .max_by_key(|&(len, index)| (len, std::cmp::Reverse(index)));
            if let Some((len, index)) = found {
                let end = scanned_before + i + 1;
                self.held
                    .truncate(if self.include_stop { end } else { end - len });
                self.stopped = true;
                return Scanned {
                    text: std::mem::take(&mut self.held),
                    stop: Some(index),
                };
            }
        }
        let keep = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Scanned {
            text: std::mem::replace(&mut self.held, rest),
            stop: None,
        }
    }

    /// The text held back, once no more will come.
    pub fn flush(&mut self) -> String {
        self.stops.iter_mut().for_each(|stop| stop.matched = 0);
        std::mem::take(&mut self.held)
    }
}

/// Knuth-Morris-Pratt over bytes. A stop string is whole characters, so every match and every partial match of it starts at
/// a character boundary of the text.
#[derive(Clone, Debug)]
struct Automaton {
    pattern: Arc<[u8]>,
    /// `border[n]`: length of the longest proper prefix of `pattern[..n]` that is also its suffix.
    border: Arc<[usize]>,
    /// Bytes of the pattern that the text seen so far ends with.
    matched: usize,
}

impl Automaton {
    fn new(pattern: &[u8]) -> Self {
        let mut border = vec![0; pattern.len() + 1];
        let mut length = 0;
        for n in 1..pattern.len() {
            while length > 0 && pattern[n] != pattern[length] {
                length = border[length];
            }
            length += usize::from(pattern[n] == pattern[length]);
            border[n + 1] = length;
        }
        Self {
            pattern: pattern.into(),
            border: border.into(),
            matched: 0,
        }
    }

    /// True where `byte` completes the pattern.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.pattern[self.matched] != byte {
            self.matched = self.border[self.matched];
        }
        self.matched += usize::from(self.pattern[self.matched] == byte);
        self.matched == self.pattern.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The whole text's answer: the shortest prefix that ends with a stop string.
    fn naive(text: &str, stops: &[String], include_stop: bool) -> (String, bool) {
        for (end, _) in text.char_indices().skip(1).chain([(text.len(), ' ')]) {
            let longest = stops
                .iter()
                .filter(|stop| text[..end].ends_with(*stop))
                .map(String::len)
                .max();
            if let Some(len) = longest {
                return (
                    text[..if include_stop { end } else { end - len }].to_owned(),
                    true,
                );
            }
        }
        (text.to_owned(), false)
    }

    /// Could more text complete a stop string that begins in the last `held` bytes?
    fn must_hold(text: &str, stops: &[String]) -> usize {
        let starts = (0..=text.len()).filter(|&at| text.is_char_boundary(at));
        let starts =
            starts.filter(|&at| at < text.len() && stops.iter().any(|stop| stop.starts_with(&text[at..])));
        starts.map(|at| text.len() - at).max().unwrap_or(0)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn equals_a_search_of_the_whole_text(
            pieces in prop::collection::vec("[abé€]{0,4}", 0..12),
            stops in prop::collection::vec("[abé€]{1,5}", 0..4),
            include_stop: bool,
        ) {
            let mut matcher = StopMatcher::new(&stops, include_stop).unwrap();
            let (mut given, mut seen, mut stopped) = (String::new(), String::new(), false);
            for piece in &pieces {
                let scanned = matcher.push(piece);
                given += &scanned.text;
                seen += piece;
                stopped |= scanned.stop.is_some();
                if !stopped {
                    prop_assert_eq!(seen.len() - given.len(), must_hold(&seen, &stops), "held too much or too little");
                }
            }
            given += &matcher.flush();
            prop_assert_eq!((given, stopped), naive(&pieces.concat(), &stops, include_stop));
        }
    }

    #[test]
    fn names_the_stop_that_was_found() {
        let stops = ["\n\n".to_owned(), "User:".to_owned()];
        let mut matcher = StopMatcher::new(&stops, false).unwrap();
        assert_eq!(
            matcher.push("Paris.\nUs"),
            Scanned {
                text: "Paris.\n".into(),
                stop: None
            }
        );
        assert_eq!(
            matcher.push("er: more"),
            Scanned {
                text: String::new(),
                stop: Some(1)
            }
        );
        assert_eq!(
            matcher.push("after"),
            Scanned {
                text: String::new(),
                stop: None
            }
        );
        assert_eq!(matcher.flush(), "");
    }

    #[test]
    fn refuses_an_empty_stop() {
        assert!(matches!(
            StopMatcher::new(&[String::new()], false),
            Err(TextError::EmptyStop)
        ));
    }
}
