//! Real chat templates against Jinja2: `scripts/render-templates` rendered what is expected here.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use plimsoll_text::{
    ChatInput, ChatTemplate, Function, ReasoningFormat, Renderer, SpecialTokens, TextError, ToolFormat,
};
use serde_json::{Value, json};

/// How the names of templates end that do not render as in Jinja2, on which conversations, and why.
const DIFFERENT: &[(&str, &[&str], &str)] = &[
    ("Cohere2MoE", &["documents"], NONE),
    ("CohereForAI-c4ai-command-r-plus-tool_use", WITHOUT_TOOLS, NONE),
    ("CohereForAI-c4ai-command-r-plus-tool_use", &["parts"], NONE),
    (
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        &["documents"],
        NONE,
    ),
    ("LFM2.5-8B-A1B", &["parallel_tool_calls"], NONE),
    (
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        WITHOUT_TOOLS,
        NONE,
    ),
    (
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        &["no_messages"],
        NONE,
    ),
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", WITHOUT_TOOLS, NONE),
    (
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        &["no_messages"],
        NONE,
    ),
    (
        "llama-cpp-deepseek-r1",
        WITH_TOOLS,
        "`generator | tojson` fails in Python, here it is a list",
    ),
    (
        "Reka-Edge",
        &["no_messages"],
        "`[][::-1]` panics in minijinja 3.0.5; the error says so",
    ),
    (
        "meetkai-functionary-medium-v3.1",
        WITH_TOOLS,
        "Jinja2 escapes for HTML what is added to a `| safe` text",
    ),
    (
        "dse_qwen2_vl",
        EVERY,
        "minijinja 3.0.5 trims the line break after `{% raw %}`, Jinja2 keeps it",
    ),
    ("tool_chat_template_llama3.2_json", &["parallel_tool_calls"], NONE),
    ("tool_chat_template_llama4_json", &["parallel_tool_calls"], NONE),
    ("trl/lfm2_2_5_v2", &["parallel_tool_calls"], NONE),
    ("trl/qwen2_5_vl", &["parallel_tool_calls"], NONE),
    ("trl/qwen3_vl", &["parallel_tool_calls"], NONE),
    (
        "tool_chat_template_llama4_pythonic",
        &["parallel_tool_calls"],
        NONE,
    ),
];
const NONE: &str = "iterating over none fails in Python, here it is empty";
const WITH_TOOLS: &[&str] = &["tools", "tool_results", "parallel_tool_calls"];
const EVERY: &[&str] = &[
    "user",
    "system_and_user",
    "no_generation_prompt",
    "many_turns",
    "reasoning",
    "thinking",
    "parts",
    "tools",
    "tool_results",
    "parallel_tool_calls",
    "roles_do_not_alternate",
    "documents",
    "no_messages",
];
const WITHOUT_TOOLS: &[&str] = &[
    "user",
    "system_and_user",
    "no_generation_prompt",
    "many_turns",
    "reasoning",
    "thinking",
    "roles_do_not_alternate",
    "documents",
];

/// 2026-02-03 04:05:06 UTC, the time in `scripts/render-templates`.
fn clock() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_770_091_506)
}

/// What `scripts/render-templates` rendered, and from what.
fn expected() -> Value {
    let path = crate::common::cached("test-data/templates-expected.json", "scripts/render-templates");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn real_templates_render_as_in_jinja2() {
    let expected = expected();
    let special_tokens: SpecialTokens = serde_json::from_value(expected["special_tokens"].clone()).unwrap();
    let results = expected["results"].as_object().unwrap();
    assert_eq!(results.len(), 158, "templates");

    let (mut failures, mut equal) = (Vec::new(), 0);
    for (name, results) in results {
        let path = crate::common::cached(&format!("test-data/{name}.jinja"), "scripts/fetch-test-data");
        let renderer = Renderer::in_process_at(clock);
        let template = ChatTemplate::new(&fs::read_to_string(path).unwrap(), &special_tokens, &renderer);
        let template = match template {
            Ok(template) => template,
            Err(error) => {
                failures.push(format!("{name}: {error}"));
                continue;
            }
        };
        for (conversation, result) in results.as_object().unwrap() {
            let rendered = template.render_as_given(&input(&expected["conversations"][conversation]));
            let excused = DIFFERENT
                .iter()
                .any(|(end, c, _)| name.ends_with(end) && c.contains(&conversation.as_str()));
            match (compare(result, rendered), excused) {
                (Ok(()), false) => equal += 1,
                (Ok(()), true) => {
                    failures.push(format!("{name}, {conversation}: equal, but listed as different"))
                }
                (Err(_), true) => {}
                (Err(problem), false) => failures.push(format!("{name}, {conversation}: {problem}")),
            }
        }
    }
    assert!(
        failures.is_empty(),
        "{} differ, {equal} are equal:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

fn input(conversation: &Value) -> ChatInput<'_> {
    let list = |name: &str| conversation[name].as_array().map(Vec::as_slice);
    ChatInput {
        messages: list("messages").unwrap(),
        tools: list("tools"),
        documents: list("documents"),
        add_generation_prompt: conversation["add_generation_prompt"].as_bool().unwrap(),
        kwargs: conversation["kwargs"].as_object(),
        ..ChatInput::default()
    }
}

/// Equal texts, or the same exception raised by the template, or a failure in both.
fn compare(expected: &Value, rendered: Result<String, TextError>) -> Result<(), String> {
    match (expected["text"].as_str(), expected["raised"].as_str(), rendered) {
        (Some(expected), _, Ok(text)) if expected == text => Ok(()),
        (Some(expected), _, Ok(text)) => Err(first_difference(expected, &text)),
        (_, Some(expected), Err(TextError::Refused(message))) if expected == message => Ok(()),
        (None, None, Err(TextError::Render(_))) => Ok(()),
        (_, _, rendered) => Err(format!("{rendered:?} instead of {expected}")),
    }
}

fn first_difference(expected: &str, text: &str) -> String {
    let same = expected
        .chars()
        .zip(text.chars())
        .take_while(|(a, b)| a == b)
        .count();
    let from = |text: &str| {
        text.chars()
            .skip(same.saturating_sub(30))
            .take(90)
            .collect::<String>()
    };
    format!(
        "after {same} characters\n  expected {:?}\n  got      {:?}",
        from(expected),
        from(text)
    )
}

fn template(source: &str) -> ChatTemplate {
    let special_tokens = SpecialTokens::from([("eos_token".to_owned(), "</s>".to_owned())]);
    ChatTemplate::new(source, &special_tokens, &Renderer::in_process_at(clock)).unwrap()
}

fn render(source: &str, messages: Value) -> Result<String, TextError> {
    let messages = messages.as_array().unwrap();
    template(source).render(&ChatInput {
        messages,
        ..Default::default()
    })
}

#[test]
fn a_refusal_carries_the_templates_own_message() {
    let source = "{% if messages|length > 1 %}{{ raise_exception('One <message> at a time!') }}{% endif %}ok";
    let message = json!({"role": "user", "content": "x"});
    assert_eq!(render(source, json!([message])).unwrap(), "ok");
    let error = render(source, json!([message, message])).unwrap_err();
    assert!(
        matches!(&error, TextError::Refused(m) if m == "One <message> at a time!"),
        "{error}"
    );
    assert!(error.is_client_error());

    let error = render("{{ messages[0].content.missing.deeper }}", json!([message])).unwrap_err();
    assert!(matches!(&error, TextError::Render(_)), "{error:?}");
    let error = ChatTemplate::new("{% if %}", &SpecialTokens::new(), &Renderer::in_process()).unwrap_err();
    assert!(
        matches!(&error, TextError::Template(_)) && !error.is_client_error(),
        "{error:?}"
    );
    let error = render("{{ strftime_now('%Q!') }}", json!([message])).unwrap_err();
    assert!(error.to_string().contains("%Q!"), "{error}");
}

#[test]
fn what_transformers_adds_to_jinja() {
    let source = "{%- generation -%} {{ messages[0].content }}{{ eos_token }} {%- endgeneration -%}\n\
                  {% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}\n\
                  {{ strftime_now('%d %b %Y %H:%M:%S') }} {{ none }} {{ true }} {{ {'a': [1, 'é<']}|tojson }}\n\
                  {{ {'b': 1.0, 'a': 1e-5}|tojson(indent=2, sort_keys=true) }} {{ 'é'|tojson(ensure_ascii=true) }}";
    let messages = json!([{"role": "user", "content": "<&>"}, {"role": "other", "content": ""}]);
    let expected = "<&></s>user03 Feb 2026 04:05:06 None True {\"a\": [1, \"é<\"]}\n\
                    {\n  \"a\": 1e-05,\n  \"b\": 1.0\n} \"\\u00e9\"";
    assert_eq!(render(source, messages).unwrap(), expected);
}

/// What Jinja2 3.1 renders.
#[test]
fn filters_of_what_is_undefined() {
    let cases = [
        ("x|length", "0"),
        ("x|count", "0"),
        ("x|items|list", "[]"),
        ("x|list", "[]"),
        ("x|join", ""),
        ("x|join(', ')", ""),
        ("x|first", ""),
        ("x|last", ""),
        ("x|max", ""),
        ("x|min", ""),
        ("x|sum", "0"),
        ("x|sort", "[]"),
        ("x|unique|list", "[]"),
        ("x|reverse|list", "[]"),
        ("x|batch(2)|list", "[]"),
        ("x|slice(2)|list", "[[], []]"),
        ("x|groupby('a')", "[]"),
        ("x|map('upper')|list", "[]"),
        ("x|map(attribute='a')|list", "[]"),
        ("x|select|list", "[]"),
        ("x|selectattr('a')|list", "[]"),
        ("x|reject|list", "[]"),
        ("x|rejectattr('a')|list", "[]"),
        ("x|string", ""),
        ("x|upper", ""),
        ("x|lower", ""),
        ("x|title", ""),
        ("x|capitalize", ""),
        ("x|trim", ""),
        ("x|replace('a', 'b')", ""),
        ("x|default('d')", "d"),
        ("x|safe", ""),
        ("x|escape", ""),
        // With something the filters are those of minijinja.
        ("'ab'|count", "2"),
        ("[2, 1]|sort|join('-')", "1-2"),
        ("[1, 2]|sum", "3"),
        ("[[1, 2], [3]]|map('first')|list", "[1, 3]"),
        ("{'a': 1}|items|list", "[('a', 1)]"),
    ];
    let render = |text: &str| render(&format!("{{{{ {text} }}}}"), json!([]));
    let wrong: Vec<_> = cases
        .into_iter()
        .map(|(text, expected)| (text, expected, render(text).map_err(|e| e.to_string())))
        .filter(|(_, expected, found)| found.as_deref() != Ok(expected))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn content_takes_the_shape_that_the_template_reads() {
    let text = "{% for m in messages %}[{{ m.content }}]{% endfor %}";
    let parts =
        "{% for m in messages %}[{% for part in m.content %}{{ part.text }};{% endfor %}]{% endfor %}";
    let both = "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}\
                {% for part in m.content %}{{ part.text }};{% endfor %}{% endif %}]{% endfor %}";
    let messages = json!([
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]},
        {"role": "assistant", "content": null},
        {"role": "assistant"},
    ]);
    assert_eq!(render(text, messages.clone()).unwrap(), "[one][two\nthree][][]");
    assert_eq!(render(parts, messages.clone()).unwrap(), "[one;][two;three;][][]");
    assert_eq!(render(both, messages).unwrap(), "[one][two;three;][][]");
}

#[test]
fn tools_go_to_where_the_template_reads_them() {
    let tools = [
        json!({"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}),
    ];
    let function = r#"{"name": "f", "description": "", "parameters": {"type": "object"}}"#;
    let cases = [
        (
            "{{ tools|tojson }}",
            true,
            format!(r#"[{{"type": "function", "function": {function}}}]"#),
        ),
        ("{{ xml_tools[0].function|tojson }}", true, function.to_owned()),
        (
            "{% for m in messages %}{{ m.role }}{% if m.tools %}[{{ m.tools }}]{% endif %};{% endfor %}",
            true,
            format!("system[[{function}]];user;"),
        ),
        ("{{ messages[0].content }}", false, "x".to_owned()),
        // Tools beside a system message alone: they are described as for templates that show none.
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ tools|tojson }}{% endif %}{{ m.content }}{% endfor %}",
            false,
            "x".to_owned(),
        ),
    ];
    for (source, takes_tools, expected) in cases {
        let template = template(source);
        assert_eq!(template.takes_tools(), takes_tools, "{source}");
        let rendered = template.render(&ChatInput {
            messages: &[json!({"role": "user", "content": "x"})],
            tools: Some(&tools),
            ..Default::default()
        });
        assert_eq!(rendered.unwrap(), expected, "{source}");
    }
    let shows = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}";
    assert!(template(shows).shows_calls());
    assert!(!template("{% for m in messages %}{{ m.content }}{% endfor %}").shows_calls());
}

#[test]
fn the_final_message_is_continued() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content|trim }}</>{% endfor %}\
                  {% if add_generation_prompt %}<assistant>{% endif %}";
    let continued = |source: &str, content: Value| {
        let messages = [
            json!({"role": "user", "content": "a"}),
            json!({"role": "assistant", "content": content}),
        ];
        template(source).render(&ChatInput {
            messages: &messages,
            continue_final_message: true,
            ..Default::default()
        })
    };
    assert_eq!(
        continued(source, json!("b \n")).unwrap(),
        "<user>a</><assistant>b \n"
    );
    assert_eq!(continued(source, json!("")).unwrap(), "<user>a</><assistant>");
    let parts = json!([{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]);
    assert_eq!(continued(source, parts).unwrap(), "<user>a</><assistant>b\nc");
    let error = continued("{{ messages[0].content }}", json!("b")).unwrap_err();
    assert!(
        error.is_client_error() && error.to_string().contains("final message"),
        "{error}"
    );
}

/// A real template by its name in `scripts/render-templates`.
fn real(name: &str) -> ChatTemplate {
    let path = crate::common::cached(&format!("test-data/{name}.jinja"), "scripts/fetch-test-data");
    template(&fs::read_to_string(path).unwrap())
}

/// Which of the real templates take tools, and the formats of calls and reasoning found in them.
#[test]
fn real_templates_tell_their_formats() {
    let mut found = String::new();
    for name in expected()["results"].as_object().unwrap().keys() {
        let template = real(name);
        let tools = match template.takes_tools() {
            true => format!("{:?}", ToolFormat::detect(template.tool_source())),
            false => "no tools".to_owned(),
        };
        let reasoning = ReasoningFormat::detect(template.source());
        found += &format!("{name}: {tools}, {reasoning:?}\n");
    }
    assert_eq!(found, include_str!("formats.txt"), "{found}");
}

/// How the names of templates end in which no format is found, and the one that their models are asked for.
const BY_FLAG: &[(&str, ToolFormat)] = &[
    ("gemma3_pythonic", ToolFormat::Pythonic),
    ("llama3.2_pythonic", ToolFormat::Pythonic),
    ("llama4_pythonic", ToolFormat::Pythonic),
];

/// How the names of templates end that ask for calls in one way and show earlier ones in another.
const SHOWN_OTHERWISE: &[(&str, ToolFormat)] = &[("phi4_mini", ToolFormat::Phi4Mini)];

/// Calls as a template shows them are calls in the format that is found in it.
#[test]
fn calls_that_real_templates_show_are_read_back() {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let functions: Arc<[Function]> = Arc::new([Function {
        name: "get_weather".to_owned(),
        parameters: parameters.as_object().unwrap().clone(),
        strict: false,
    }]);
    let tools = [
        json!({"type": "function", "function": {"name": "get_weather", "description": "", "parameters": parameters}}),
    ];
    let call = json!({"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"});
    let call = json!({"id": "call00001", "type": "function", "function": call});
    let messages = [
        json!({"role": "user", "content": "Weather?"}),
        json!({"role": "assistant", "content": "", "tool_calls": [call]}),
    ];
    let mut read_back = 0;
    for name in expected()["results"].as_object().unwrap().keys() {
        let template = real(name);
        if !template.takes_tools() || !template.shows_calls() {
            continue;
        }
        let named = |list: &[(&str, ToolFormat)]| {
            list.iter()
                .find(|(end, _)| name.ends_with(end))
                .map(|(_, format)| *format)
        };
        let by_flag = named(BY_FLAG);
        let found = ToolFormat::detect(template.tool_source());
        assert!(found.is_none() || by_flag.is_none(), "{name}: {found:?}");
        let Some(format) = found.or(by_flag) else {
            continue;
        };
        let render = |messages: &[Value], add_generation_prompt| {
            let input = ChatInput {
                messages,
                tools: Some(&tools),
                add_generation_prompt,
                ..ChatInput::default()
            };
            template
                .render(&input)
                .unwrap_or_else(|error| panic!("{name}: {error}"))
        };
        // What the prompt ends with may be no part of earlier turns, such as `<think>`.
        let whole = render(&messages, false);
        let before = [true, false].map(|add_generation_prompt| render(&messages[..1], add_generation_prompt));
        let answer = before
            .iter()
            .find_map(|before| whole.strip_prefix(before.as_str()));
        let (_, calls) = crate::common::told(format, &functions, answer.unwrap_or(&whole));
        match named(SHOWN_OTHERWISE) {
            Some(other) => assert_eq!((format, calls), (other, vec![]), "{name}: {whole}"),
            None => {
                let expected = ("get_weather".to_owned(), "{\"city\": \"Paris\"}".to_owned());
                assert_eq!(calls, [expected], "{name}, {format:?}: {whole}");
                read_back += 1;
            }
        }
    }
    assert_eq!(read_back, 49, "templates");
}

/// The template in Phi-3's GGUF files shows neither tools nor system messages.
#[test]
fn phi_3_takes_no_tools() {
    let metadata = crate::common::vocabulary("phi-3");
    let renderer = Renderer::in_process();
    let template = ChatTemplate::from_gguf(
        Path::new("phi-3.gguf"),
        &metadata,
        &SpecialTokens::new(),
        &renderer,
    );
    let template = template.unwrap().unwrap();
    assert!(!template.takes_tools() && !template.shows_system());
    assert_eq!(ReasoningFormat::detect(template.source()), None);
}

#[test]
fn arguments_of_tool_calls_are_parsed() {
    let source = "{% for call in messages[0].tool_calls %}{{ call.function.arguments|tojson }}{% endfor %}";
    let call = |arguments: &str| json!([{"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}]);
    assert_eq!(
        render(source, call("{\"b\":1,\"a\":[]}")).unwrap(),
        "{\"b\": 1, \"a\": []}"
    );
    assert_eq!(render(source, call("")).unwrap(), "{}");
    let error = render(source, call("[1]")).unwrap_err().to_string();
    assert!(
        error.contains("messages[0]") && error.contains("arguments"),
        "{error}"
    );
}

/// As transformers from 4.52 on and older processors of images write them.
#[test]
fn templates_are_where_transformers_writes_them() {
    let directory = tempfile::tempdir().unwrap();
    let write = |file: &str, text: String| fs::write(directory.path().join(file), text).unwrap();
    let rendered = |tools: Option<&[Value]>| {
        let template = ChatTemplate::from_dir(directory.path(), &Renderer::in_process());
        let input = ChatInput {
            tools,
            ..Default::default()
        };
        template.unwrap().unwrap().render(&input).unwrap()
    };
    let tools = [json!({})];
    write(
        "chat_template.json",
        json!({"chat_template": "of a processor"}).to_string(),
    );
    assert_eq!(rendered(None), "of a processor");
    write(
        "tokenizer_config.json",
        json!({"chat_template": "of a tokenizer"}).to_string(),
    );
    assert_eq!(rendered(None), "of a tokenizer");
    write("chat_template.jinja", "plain".to_owned());
    assert_eq!(rendered(Some(&tools)), "plain");
    fs::create_dir(directory.path().join("additional_chat_templates")).unwrap();
    write(
        "additional_chat_templates/tool_use.jinja",
        "{{ tools|length }}".to_owned(),
    );
    assert_eq!(rendered(Some(&tools)), "1");
    assert_eq!(rendered(None), "plain");
}

#[test]
fn tools_choose_the_template_for_tools() {
    let directory = tempfile::tempdir().unwrap();
    assert!(
        ChatTemplate::from_dir(directory.path(), &Renderer::in_process())
            .unwrap()
            .is_none()
    );
    let named = json!([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools|length }}"}]);
    let config = json!({"chat_template": named, "bos_token": {"content": "<s>"}});
    fs::write(directory.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let template = ChatTemplate::from_dir(directory.path(), &Renderer::in_process())
        .unwrap()
        .unwrap();
    assert_eq!(template.render(&ChatInput::default()).unwrap(), "plain");
    let tools = [json!({})];
    assert_eq!(
        template
            .render(&ChatInput {
                tools: Some(&tools),
                ..Default::default()
            })
            .unwrap(),
        "1"
    );

    // A file of its own wins.
    fs::write(
        directory.path().join("chat_template.jinja"),
        "{{ bos_token }}{{ x }}",
    )
    .unwrap();
    let template = ChatTemplate::from_dir(directory.path(), &Renderer::in_process())
        .unwrap()
        .unwrap();
    let kwargs = json!({"x": 5});
    assert_eq!(
        template
            .render(&ChatInput {
                kwargs: kwargs.as_object(),
                ..Default::default()
            })
            .unwrap(),
        "<s>5"
    );
}
