use super::Part;

/// Collects the parts of an answer.
#[derive(Debug)]
pub(super) struct Sink {
    parts: Vec<Part>,
    /// Whitespace at the end of the content, which is dropped before a call.
    space: String,
    holds_space: bool,
    calls: usize,
    max_calls: Option<usize>,
    full: bool,
}

impl Sink {
    pub(super) fn new(holds_space: bool, max_calls: Option<usize>) -> Self {
        Self {
            parts: Vec::new(),
            space: String::new(),
            holds_space,
            calls: 0,
            max_calls,
            full: false,
        }
    }

    pub(super) fn drain(&mut self) -> Vec<Part> {
        std::mem::take(&mut self.parts)
    }

    pub(super) fn is_full(&self) -> bool {
        self.full
    }

    pub(super) fn reasoning(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.parts.last_mut() {
            Some(Part::Reasoning(last)) => last.push_str(text),
            _ => self.parts.push(Part::Reasoning(text.to_owned())),
        }
    }

    pub(super) fn content(&mut self, c: char) {
        if self.full {
            return;
        }
        if self.holds_space && c.is_whitespace() {
            self.space.push(c);
            return;
        }
        self.give_space();
        match self.parts.last_mut() {
            Some(Part::Content(last)) => last.push(c),
            _ => self.parts.push(Part::Content(c.to_string())),
        }
    }

    pub(super) fn contents(&mut self, text: &str) {
        text.chars().for_each(|c| self.content(c));
    }

    /// Drops whitespace before a call, even one that is not emitted.
    pub(super) fn drop_space(&mut self) {
        self.space.clear();
    }

    pub(super) fn call(&mut self, name: &str) {
        self.drop_space();
        self.full |= self.max_calls == Some(self.calls);
        if !self.full {
            self.calls += 1;
            self.parts.push(Part::Call {
                name: name.to_owned(),
            });
        }
    }

    pub(super) fn arguments(&mut self, text: &str) {
        if self.full || text.is_empty() {
            return;
        }
        match self.parts.last_mut() {
            Some(Part::Arguments(last)) => last.push_str(text),
            _ => self.parts.push(Part::Arguments(text.to_owned())),
        }
    }

    /// Whitespace at the end of an answer without calls is content.
    pub(super) fn finish(&mut self) {
        if self.calls == 0 {
            self.give_space();
        }
        self.space.clear();
    }

    fn give_space(&mut self) {
        if self.space.is_empty() {
            return;
        }
        let space = std::mem::take(&mut self.space);
        match self.parts.last_mut() {
            Some(Part::Content(last)) => last.push_str(&space),
            _ => self.parts.push(Part::Content(space)),
        }
    }
}
