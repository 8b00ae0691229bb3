//! The fuzz targets over disturbed known inputs. `fuzz/` runs the same functions under libFuzzer.

mod grammars;
#[path = "../../../../fuzz/inputs.rs"]
mod inputs;
mod targets;

use inputs::inputs;
use proptest::prelude::*;

const TEXTS: &[&str] = &[
    "Hello, world",
    "héllo €  \u{1f4a9} \u{fffd} \u{feff}",
    "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467} e\u{301}\u{301}",
    "aaaaaaaaab aab",
    "\0\u{7f}\u{80}\u{7ff}\u{800}\u{ffff}\u{10000}",
];
const STOPS: &[&str] = &[
    "\0END\n\nText END more",
    "\u{1}a\naa\naab\n\naaaaab",
    "\u{3}€\né€\n\nhé€llo",
    "\u{4}\n\nno stops",
    "\u{5}abab\nba\n\nabaabab",
    "\u{7}User:\nAssistant:\n\nUser User: x",
];
const TEMPLATES: &[&str] = &[
    "{% for m in messages %}{{ m['role'] }}: {{ m.content | trim }}\n{% endfor %}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ tools | tojson(indent=2) }}",
    "{%- set ns = namespace(i=0) -%}{% for m in messages[::-1] %}{% set ns.i = ns.i + 1 %}{{ ns.i }}{% endfor %}",
    "{% macro f(x, y=1) %}{{ x ~ y }}{% endmacro %}{{ f(messages[0].content) }}{{ raise_exception('no') }}",
    "{{ strftime_now('%Y-%m-%d') }}{% if messages is iterable and x is not defined %}{{ bos_token }}{% endif %}",
    "{% generation %}{{ messages[2].tool_calls[0].function.arguments.a[1] }}{% endgeneration %}{{ 'a'.split('b') }}",
    "{{ messages[0].content.upper().replace('S', 'x')[1:-1].strip() }}{{ range(3) | list }}{{ 7 // 0 }}",
];
const JINJA: &[&str] = &[
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    "{%-",
    "-%}",
    "| tojson",
    "| trim",
    "[::-1]",
    "[1:0:0]",
    "[-1]",
    ".items()",
    "loop.index",
    "loop.previtem",
    "is string",
    "not in",
    "namespace()",
    "raise_exception(",
    "strftime_now('%')",
    "messages",
    "{% endfor %}",
    "{% if",
    "{% for",
    "{% set",
    "{% macro",
    "range(9)",
    "'",
    "\"",
    "| join",
    "| last",
    "| reject",
    "~",
    "**",
    "% 0",
    "// 0",
    "9223372036854775807",
    "-9223372036854775808",
    "1e400",
    "\\u",
    "\u{0}",
    ".format(",
    "% (1, 2)",
];
const CONVERSATIONS: &[&str] = &[
    r#"{"messages": [{"role": "user", "content": "Hello"}]}"#,
    r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}"#,
    r#"{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]}, {"role": "tool", "content": "2"}]}"#,
    r#"{"messages": [], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2.5, null, true]}}}]}"#,
    r#"{"messages": [{"role": 1}, {"content": {"a": "b"}}, {"tool_calls": {}}], "kwargs": {"enable_thinking": true, "messages": 7}}"#,
];
const JSON: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "null",
    "true",
    "1e308",
    "-0.0",
    "18446744073709551616",
    "\"\"",
    "\"\\ud83d\\ude00\"",
    "\"\\u0000\"",
    "\"arguments\": ",
    "\"arguments\": \"[]\"",
    "\"tool_calls\": [",
    "\"function\": ",
    "\"content\": ",
    "\"type\": ",
    "\"text\"",
    "\"image_url\"",
    "\"messages\": ",
    "\"role\"",
    "\"tools\": ",
    "\"kwargs\": {",
    "<|im_start|>",
];

const GRAMMARS: &[&str] = &[
    "\0\u{1}{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\"}}, \"required\": [\"a\"]}",
    "\0\u{2}{\"enum\": [1, null, \"é\"]}",
    "\0\u{3}{\"anyOf\": [{\"type\": \"string\", \"maxLength\": 3}, {\"type\": \"array\", \"items\": {\"type\": \"number\"}, \"maxItems\": 2}]}",
    "\0\u{4}{\"$ref\": \"#/$defs/a\", \"$defs\": {\"a\": {\"type\": \"object\", \"properties\": {\"a\": {\"$ref\": \"#/$defs/a\"}}}}}",
    "@\u{5}{\"type\": \"string\", \"pattern\": \"^[a-z]+$\", \"format\": \"date\", \"not\": {}}",
    "\u{1}\u{6}(a|b)*[0-9]{2,4}é?",
    "\u{1}\u{7}\\d+\\.\\d+(?i:abc)$",
    "\u{2}\u{8}start: \"a\" b+\nb: /[0-9]/ | \"(\" start \")\"",
    "\u{2}\u{9}start: %json { \"type\": \"boolean\" } \".\"",
    "\u{3}\u{a}root ::= \"a\" item{2,3} [^0-9]*\nitem ::= [a-z]+ | \"(\" root \")\"",
    "\u{4}\u{b}yes\nno\nyesterday",
];
const GRAMMAR_WORDS: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "*",
    "+",
    "?",
    "|",
    "{1000000}",
    "{0,0}",
    "^",
    "$",
    "\\p{L}",
    "\\b",
    "(?=a)",
    "start: ",
    "root ::= ",
    "%ignore /x/",
    "%json {}",
    "\"type\": \"object\", ",
    "\"minimum\": 1e400, ",
    "\"multipleOf\": 0, ",
    "\"maxLength\": -1, ",
    "\"$ref\": \"#\", ",
    "\"allOf\": [{}], ",
    "\"oneOf\": [], ",
    "\"pattern\": \"(\", ",
    "\"additionalProperties\": false, ",
    "null",
    "é",
    "\n",
];

proptest! {
    // Each compiles a grammar.
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn grammar(data in inputs(GRAMMARS, GRAMMAR_WORDS)) {
        grammars::grammar(&data);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn detokenizer(data in inputs(TEXTS, TEXTS)) {
        targets::detokenizer(&data);
    }

    #[test]
    fn stop(data in inputs(STOPS, &["\n", "\n\n", "a", "ab", "€", "User", ":", " "])) {
        targets::stop(&data);
    }

    #[test]
    fn template(data in inputs(TEMPLATES, JINJA)) {
        targets::template(&data);
    }

    #[test]
    fn messages(data in inputs(CONVERSATIONS, JSON)) {
        targets::messages(&data);
    }
}
