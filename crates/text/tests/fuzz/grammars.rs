//! The fuzz target of structured output.

use std::sync::LazyLock;

use plimsoll_core::{Progress, mask};
use plimsoll_text::Tokenizer;
use plimsoll_text::grammar::{Grammar, GrammarCompiler, GrammarSpec};

/// What the errors of the grammar engine's bounds say.
const BOUNDS: [&str; 3] = ["too many", "limit", "too large"];
/// Steps that are followed.
const STEPS: usize = 48;

static COMPILER: LazyLock<GrammarCompiler> = LazyLock::new(|| {
    let tokenizer = Tokenizer::bytes();
    let ends = tokenizer.eos_ids().to_vec();
    GrammarCompiler::new(tokenizer, &ends)
});

/// The first byte chooses the kind of grammar, the second what is said by it; the rest is the grammar. It is refused, or can be
/// followed: some token is allowed until the text is complete, and what is allowed is accepted.
pub(crate) fn grammar(data: &[u8]) {
    let [kind, walk, text @ ..] = data else {
        return;
    };
    let text = String::from_utf8_lossy(text).into_owned();
    let spec = match kind % 5 {
        0 => match serde_json::from_str(&text) {
            Ok(schema) => GrammarSpec::JsonSchema {
                schema,
                strict: kind & 64 != 0,
            },
            Err(_) => return,
        },
        1 => GrammarSpec::Regex(text),
        2 => GrammarSpec::Lark(text),
        3 => GrammarSpec::Ebnf(text),
        _ => GrammarSpec::Choice(text.lines().map(str::to_owned).collect()),
    };
    let Ok(compiled) = COMPILER.compile(&Grammar::from(spec.clone())) else {
        return;
    };
    let end = Tokenizer::bytes().eos_ids()[0];
    let mut constraint = compiled.constraint(&[end]);
    let mut choice = usize::from(*walk);
    for _ in 0..STEPS {
        let mut mask = vec![u32::MAX; mask::words(end as usize + 1)];
        // Grammars come from clients: one that takes too long ends its own request.
        if constraint.restrict(&mut mask).is_err() {
            return;
        }
        let allowed: Vec<u32> = (0..=end).filter(|&token| mask::allows(&mask, token)).collect();
        assert!(!allowed.is_empty(), "nothing may follow: {spec:?}");
        let Some(&token) = allowed.get(choice % allowed.len()).filter(|&&token| token != end) else {
            return;
        };
        choice = choice.wrapping_mul(31).wrapping_add(7);
        match constraint.accept(token) {
            Ok(Progress::Open) => {}
            Ok(Progress::Complete) => return,
            // Where a state grew beyond its bound.
            Err(error) if BOUNDS.iter().any(|bound| error.to_string().contains(bound)) => return,
            Err(error) => panic!("{token} was allowed and is not accepted: {error}; {spec:?}"),
        }
    }
}
