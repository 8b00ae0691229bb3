/// Finds one of several marks in a stream of characters. No mark may begin with another one.
#[derive(Clone, Debug)]
pub(super) struct Marks {
    marks: Vec<&'static str>,
    /// End of the text that may be the beginning of a mark.
    held: String,
}

/// Result of one more character.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// Text up to here, which may be empty, is no part of a mark.
    Text(String),
    /// This mark is complete; `text` came before it.
    Mark {
        /// Text before.
        text: String,
        /// Index of the mark.
        index: usize,
    },
}

impl Marks {
    pub(super) fn new(marks: &[&'static str]) -> Self {
        Self {
            marks: marks.to_vec(),
            held: String::new(),
        }
    }

    pub(super) fn mark(&self, index: usize) -> &'static str {
        self.marks[index]
    }

    pub(super) fn take(&mut self, c: char) -> Seen {
        self.held.push(c);
        let begins = |text: &str| self.marks.iter().any(|mark| mark.starts_with(text));
        let starts = self.held.char_indices().map(|(at, _)| at);
        let keep = starts
            .filter(|&at| begins(&self.held[at..]))
            .min()
            .unwrap_or(self.held.len());
        let text = self.held[..keep].to_owned();
        self.held.drain(..keep);
        match self.marks.iter().position(|mark| *mark == self.held) {
            Some(index) => {
                self.held.clear();
                Seen::Mark { text, index }
            }
            None => Seen::Text(text),
        }
    }

    /// Nothing more comes: what was held is text.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// A mark that is expected after space, but may be missing.
#[derive(Debug)]
pub(super) struct Closing {
    mark: &'static str,
    space: String,
    matched: usize,
}

/// Result of one more character.
pub(super) enum Closed {
    More,
    Yes,
    /// It is missing; this is text.
    No(String),
}

impl Closing {
    pub(super) fn new(mark: &'static str) -> Self {
        Self {
            mark,
            space: String::new(),
            matched: 0,
        }
    }

    pub(super) fn take(&mut self, c: char) -> Closed {
        if self.matched == 0 && c.is_whitespace() {
            self.space.push(c);
            return Closed::More;
        }
        if self.mark[self.matched..].starts_with(c) {
            self.matched += c.len_utf8();
            return match self.matched == self.mark.len() {
                true => Closed::Yes,
                false => Closed::More,
            };
        }
        Closed::No(format!("{}{c}", self.finish()))
    }

    /// What was held back.
    pub(super) fn finish(&mut self) -> String {
        format!("{}{}", self.space, &self.mark[..self.matched])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_found_however_they_begin() {
        let mut marks = Marks::new(&["<<a>", "</a>"]);
        let (mut text, mut found) = (String::new(), Vec::new());
        for c in "x<<<a><</a>y<<".chars() {
            match marks.take(c) {
                Seen::Text(more) => text += &more,
                Seen::Mark { text: more, index } => {
                    text += &more;
                    found.push((text.len(), index));
                }
            }
        }
        assert_eq!((text.as_str(), found.as_slice()), ("x<<y", &[(2, 0), (3, 1)][..]));
        assert_eq!(marks.finish(), "<<");
    }
}
