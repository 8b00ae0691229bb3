//! What the fuzz targets check. Each takes any bytes and panics where a promise does not hold. Driven by `main.rs` beside it in
//! every test run, and by libFuzzer (`fuzz/`).

use std::sync::LazyLock;
use std::thread;

use plimsoll_text::{ChatInput, ChatTemplate, Renderer, SpecialTokens, StopMatcher, TextError, Tokenizer};
use serde_json::{Map, Value, json};

/// Bytes as tokens: what comes out piece by piece is their text, whatever the order and however it is cut.
pub(crate) fn detokenizer(data: &[u8]) {
    let tokenizer = Tokenizer::bytes();
    let tokens: Vec<u32> = data.iter().map(|&byte| byte.into()).collect();
    let mut incremental = tokenizer.detokenizer(true).continuing();
    let mut text = String::new();
    for (i, &token) in tokens.iter().enumerate() {
        text += &incremental.push(token);
        assert!(
            i + 1 - text.len().min(i + 1) <= 3,
            "more than an unfinished character is held back"
        );
        // Special tokens and those outside the vocabulary are no text, wherever they come.
        let nothing = incremental.push(if i % 2 == 0 { 256 } else { u32::MAX });
        assert_eq!(nothing, "");
    }
    text += &incremental.flush();
    assert_eq!(text, String::from_utf8_lossy(data));
    assert_eq!(text, tokenizer.decode(&tokens, true));
}

/// Lines: the stop strings, an empty line, the text. Found as a search of the whole text finds it, however the text is cut.
pub(crate) fn stop(data: &[u8]) {
    let Some((&head, rest)) = data.split_first() else {
        return;
    };
    let input = String::from_utf8_lossy(rest);
    let (stops, text) = input.split_once("\n\n").unwrap_or(("", &input));
    let stops: Vec<String> = stops.lines().take(8).map(str::to_owned).collect();
    let include = head & 1 == 1;
    let Ok(mut matcher) = StopMatcher::new(&stops, include) else {
        assert!(
            stops.iter().any(String::is_empty),
            "only an empty stop string is refused"
        );
        return;
    };
    let size = usize::from(head >> 1) % 7 + 1;
    let chars: Vec<char> = text.chars().collect();
    let (mut given, mut found) = (String::new(), None);
    for piece in chars.chunks(size) {
        let scanned = matcher.push(&piece.iter().collect::<String>());
        given += &scanned.text;
        found = found.or(scanned.stop);
    }
    given += &matcher.flush();
    // The match that is complete first; of those the longest.
    let ends = stops
        .iter()
        .filter_map(|stop| Some((text.find(stop)? + stop.len(), stop.len())));
    match ends.min_by_key(|&(end, len)| (end, usize::MAX - len)) {
        None => assert_eq!((given.as_str(), found), (text, None)),
        Some((end, len)) => {
            assert_eq!(given, text[..if include { end } else { end - len }]);
            assert_eq!(stops[found.expect("it is there")].len(), len);
        }
    }
}

/// Processes that render.
static WORKERS: LazyLock<Renderer> = LazyLock::new(|| Renderer::workers(crate::template_worker()));
/// More than a worker has: what it can render, a thread can.
const STACK_BYTES: usize = 256 << 20;

/// A template that comes from anywhere is refused, or renders, or fails with an error, or exceeds a bound; it never takes the
/// process with it. What a worker renders is what is rendered without it.
pub(crate) fn template(data: &[u8]) {
    let source = String::from_utf8_lossy(data).into_owned();
    let bounded = rendered(&source, &WORKERS);
    if let Err(error) = &bounded {
        if !crate::NAMES_OVERFLOWS && error.to_string().contains("SIGSEGV") {
            return;
        }
        assert!(!matches!(error, TextError::Worker(_)), "{error}");
        if matches!(error, TextError::Limit(_)) {
            return;
        }
    }
    // The coverage of libFuzzer is that of this process.
    let here = thread::Builder::new().stack_size(STACK_BYTES);
    let here = here.spawn({
        let source = source.clone();
        move || rendered(&source, &Renderer::in_process())
    });
    let here = here.expect("a thread starts").join().expect("it does not panic");
    let text = |rendered: Result<String, TextError>| rendered.map_err(|error| error.to_string());
    assert!(
        text(bounded) == text(here) || source.contains("now"),
        "rendering is a function of the template and its input"
    );
}

fn rendered(source: &str, renderer: &Renderer) -> Result<String, TextError> {
    let messages = [
        json!({ "role": "system", "content": "s" }),
        json!({ "role": "user", "content": "é<|eos|>" }),
        json!({ "role": "assistant", "content": null, "tool_calls": [call("{\"a\": [1, 2.5, null]}")] }),
        json!({ "role": "tool", "content": "2", "tool_call_id": "1" }),
    ];
    let tools =
        [json!({ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } })];
    ChatTemplate::new(source, &SpecialTokens::new(), renderer)?.render(&ChatInput {
        messages: &messages,
        tools: Some(&tools),
        add_generation_prompt: true,
        ..Default::default()
    })
}

fn call(arguments: &str) -> Value {
    json!({ "type": "function", "id": "1", "function": { "name": "f", "arguments": arguments } })
}

/// A template of the kind that models come with, which reads whatever a message may have.
const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content | trim }}\
    {% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% for c in m.tool_calls or [] %}\
    <tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
    {% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% if enable_thinking %}<think>{% endif %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// JSON of a client as messages, tools and variables of a model's template: an error that is the client's fault, or a text in
/// which every message has its turn.
pub(crate) fn messages(data: &[u8]) {
    let Ok(value) = serde_json::from_slice::<Value>(data) else {
        return;
    };
    let list = |key: &str| value.get(key).and_then(Value::as_array).cloned();
    let (messages, tools) = (list("messages").unwrap_or_default(), list("tools"));
    let kwargs: Option<Map<String, Value>> = value.get("kwargs").and_then(Value::as_object).cloned();
    let template = ChatTemplate::new(CHATML, &SpecialTokens::new(), &Renderer::in_process())
        .expect("a constant template");
    let rendered = template.render(&ChatInput {
        messages: &messages,
        tools: tools.as_deref(),
        kwargs: kwargs.as_ref(),
        ..Default::default()
    });
    match rendered {
        Ok(text) => {
            let turns = text.matches("<|im_start|>").count();
            assert!(
                turns >= messages.len(),
                "{} messages became {turns} turns",
                messages.len()
            );
        }
        Err(error) => assert!(
            error.is_client_error() || matches!(error, TextError::Render(_)),
            "{error}"
        ),
    }
}
