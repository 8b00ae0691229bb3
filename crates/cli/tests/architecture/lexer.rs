//! Just enough of Rust's lexical structure to tell code from comments and literals.

/// One lexeme of a source file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Lexeme<'a> {
    Code(&'a str),
    /// Content of a string literal, without quotes.
    Literal(&'a str),
}

/// Code and string literals of `source`, comments left out.
pub(crate) fn lexemes(source: &str) -> Vec<Lexeme<'_>> {
    let mut lexemes = Vec::new();
    let mut rest = source;
    while !rest.is_empty() {
        let code = rest.find(['"', '/', '\'']).unwrap_or(rest.len());
        let (before, after) = rest.split_at(code);
        let (length, literal) = match () {
            () if after.starts_with("//") => (after.find('\n').unwrap_or(after.len()), None),
            () if after.starts_with("/*") => (block_comment(after), None),
            () if after.starts_with('"') => string(before, after),
            () if after.starts_with('\'') => (character(after), None),
            () => (after.chars().next().map_or(0, char::len_utf8), None),
        };
        lexemes.push(Lexeme::Code(before));
        match literal {
            Some(literal) => lexemes.push(Lexeme::Literal(literal)),
            None if after.starts_with('/') && length == 1 => lexemes.push(Lexeme::Code(&after[..1])),
            None => {}
        }
        rest = &after[length..];
    }
    lexemes
}

/// All code, with literals left out.
pub(crate) fn code(source: &str) -> String {
    let code = lexemes(source).into_iter().map(|lexeme| match lexeme {
        Lexeme::Code(code) => code,
        Lexeme::Literal(_) => "\"\"",
    });
    code.collect()
}

fn block_comment(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        match &text.as_bytes()[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// `text` begins with a quote; what stands before says whether the literal is raw.
fn string<'a>(before: &str, text: &'a str) -> (usize, Option<&'a str>) {
    let hashes = before.len() - before.trim_end_matches('#').len();
    let raw = before[..before.len() - hashes].ends_with('r');
    if raw {
        let close = format!("\"{}", "#".repeat(hashes));
        let end = text[1..].find(&close).map_or(text.len(), |end| end + 1);
        return ((end + close.len()).min(text.len()), Some(&text[1..end]));
    }
    let bytes = text.as_bytes();
    let mut at = 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    ((at + 1).min(text.len()), Some(&text[1..at.min(text.len())]))
}

/// A character literal, or the quote of a lifetime alone.
fn character(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), _) => text[3..].find('\'').map_or(text.len(), |end| end + 4),
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 1,
    }
}

#[test]
fn code_is_what_is_left() {
    let source = r####"
        let a = "unsafe \" x"; // unsafe
        /* unsafe /* nested */ unsafe */ let b = r#"unsafe "quoted""#;
        let c = '"'; let d: &'static str = b"x"; let e = '\''; 1 / 2
    "####;
    let code = code(source);
    assert!(!code.contains("unsafe"), "{code}");
    for kept in [
        "let a",
        "let b",
        "let c",
        "&'static str".trim_start_matches("&'"),
        "1 / 2",
    ] {
        assert!(code.contains(kept), "{kept} in {code}");
    }
    let literals: Vec<_> = lexemes(source)
        .into_iter()
        .filter(|p| matches!(p, Lexeme::Literal(_)))
        .collect();
    let expected = [r#"unsafe \" x"#, r#"unsafe "quoted""#, "x"].map(Lexeme::Literal);
    assert_eq!(literals, expected);
}
