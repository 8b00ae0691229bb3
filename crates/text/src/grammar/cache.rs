use std::collections::VecDeque;

use super::CompiledGrammar;

/// Grammars kept: a client asks for the same ones again and again.
const GRAMMARS: usize = 64;
/// Bytes of their texts.
const BYTES: usize = 8 << 20;

/// What was compiled last, the latest at the front.
#[derive(Debug, Default)]
pub(super) struct Cache {
    entries: VecDeque<(String, CompiledGrammar)>,
    bytes: usize,
}

impl Cache {
    pub(super) fn get(&mut self, key: &str) -> Option<CompiledGrammar> {
        let at = self.entries.iter().position(|(known, _)| known == key)?;
        let entry = self.entries.remove(at)?;
        let grammar = entry.1.clone();
        self.entries.push_front(entry);
        Some(grammar)
    }

    pub(super) fn insert(&mut self, key: String, grammar: CompiledGrammar) {
        if self.get(&key).is_some() {
            return;
        }
        self.bytes += key.len();
        self.entries.push_front((key, grammar));
        while self.entries.len() > GRAMMARS || self.bytes > BYTES {
            let Some((key, _)) = self.entries.pop_back() else {
                return;
            };
            self.bytes -= key.len();
        }
    }
}
