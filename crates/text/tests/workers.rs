//! Templates that would take a process with them, and the workers that bear them.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_text::{
    ChatInput, ChatTemplate, RenderLimit, Renderer, SpecialTokens, TextError, WorkerProgram,
};
use serde_json::{Value, json};

#[path = "fuzz/corpus.rs"]
#[allow(dead_code, reason = "shared with tests/fuzz, which uses the rest")]
mod corpus;

fn program() -> WorkerProgram {
    WorkerProgram {
        path: env!("CARGO_BIN_EXE_template-worker").into(),
        args: Vec::new(),
    }
}

fn compile(source: &str, renderer: &Renderer) -> Result<ChatTemplate, TextError> {
    ChatTemplate::new(source, &SpecialTokens::new(), renderer)
}

fn render(template: &ChatTemplate, content: &str, kwargs: Value) -> Result<String, TextError> {
    let messages = [json!({"role": "user", "content": content})];
    template.render(&ChatInput {
        messages: &messages,
        kwargs: kwargs.as_object(),
        ..Default::default()
    })
}

/// Hostile only if a message says so: a template that is hostile at once is refused when it is loaded.
fn when_asked(source: &str) -> String {
    format!("{{% if messages[0].content == 'now' %}}{source}{{% endif %}}fine")
}

fn limit_of(source: &str, renderer: &Renderer) -> Option<RenderLimit> {
    let template = compile(&when_asked(source), renderer).unwrap();
    let limit = match render(&template, "now", json!({})) {
        Err(error @ TextError::Limit(limit)) => {
            assert!(error.is_client_error());
            Some(limit)
        }
        Err(TextError::Render(_)) => None,
        other => panic!("{source}: {other:?}"),
    };
    assert_eq!(render(&template, "later", json!({})).unwrap(), "fine", "{source}");
    limit
}

#[test]
fn hostile_templates_exceed_a_bound_and_nothing_else() {
    let renderer = Renderer::workers(program());
    let limit = |source| limit_of(source, &renderer);
    assert_eq!(limit(corpus::CYCLE), Some(RenderLimit::Stack));
    assert_eq!(limit(corpus::ENDLESS), Some(RenderLimit::Steps));
    assert_eq!(limit(corpus::DOUBLING), Some(RenderLimit::Memory));
    // The engine's own limit of calls may come first.
    assert!(matches!(
        limit(corpus::RECURSION),
        None | Some(RenderLimit::Memory)
    ));
    let long = "{% set s = 'x' * 1000 %}{% for i in range(99999) %}{{ s }}{% endfor %}";
    assert_eq!(limit(long), Some(RenderLimit::Output));
    let straight = format!("{{% set a = 'x' %}}{}", "{% set a = a ~ a %}".repeat(60));
    assert_eq!(limit(&straight), Some(RenderLimit::Memory));
}

#[test]
fn a_template_that_is_hostile_at_once_is_not_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("chat_template.jinja");
    let renderer = Renderer::workers(program());
    for (source, problem) in [
        (corpus::CYCLE, "recursed without end"),
        (corpus::DOUBLING, "more than 512 MiB of memory"),
        (corpus::ENDLESS, "more than 50000000 steps"),
        ("{% if %}", "not valid Jinja"),
    ] {
        std::fs::write(&path, source).unwrap();
        let error = ChatTemplate::from_dir(directory.path(), &renderer).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains(problem) && text.contains(&format!("chat_template of {}", path.display())),
            "{text}"
        );
        assert!(!error.is_client_error());
    }
}

#[test]
fn time_is_bounded() {
    let renderer = Renderer::workers_within(program(), Duration::from_secs(4));
    // Each step copies much, and few are needed.
    let slow = "{% set s = 'xy' * 9999999 %}{% for i in range(99999) %}{% set t = s.replace('x', 'z') %}{% endfor %}";
    let began = Instant::now();
    assert_eq!(limit_of(slow, &renderer), Some(RenderLimit::Time));
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn others_are_not_affected() {
    let renderer = Renderer::workers(program());
    let hostile = Arc::new(compile(&when_asked(corpus::CYCLE), &renderer).unwrap());
    let template = Arc::new(compile("{{ messages[0].content }}/{{ x }}", &renderer).unwrap());
    thread::scope(|scope| {
        for i in 0..4 {
            let (hostile, template) = (Arc::clone(&hostile), Arc::clone(&template));
            scope.spawn(move || {
                for j in 0..20 {
                    let content = format!("{i} {j}");
                    if i == 0 {
                        let error = render(&hostile, "now", json!({})).unwrap_err();
                        assert!(matches!(error, TextError::Limit(RenderLimit::Stack)), "{error}");
                    } else {
                        let text = render(&template, &content, json!({"x": j})).unwrap();
                        assert_eq!(text, format!("{content}/{j}"));
                    }
                }
            });
        }
    });
}

#[test]
fn a_worker_renders_what_this_process_renders() {
    let source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ a | tojson }} {{ b }} {{ c }} {{ d }}{{ missing.x }}";
    let kwargs = json!({"a": {"z": [0.1, 0.30000000000000004, 1e300], "y": u64::MAX}, "b": -1, "c": null, "d": "é\u{0}"});
    let here = compile(source, &Renderer::in_process()).unwrap();
    let there = compile(source, &Renderer::workers(program())).unwrap();
    let text = |template: &ChatTemplate, kwargs: &Value| {
        render(template, "Hello", kwargs.clone()).map_err(|error| error.to_string())
    };
    assert_eq!(text(&there, &kwargs), text(&here, &kwargs));
    assert!(text(&here, &kwargs).is_err());
    let kwargs = json!({"missing": {"x": 1}, "a": kwargs["a"], "d": kwargs["d"]});
    assert_eq!(text(&there, &kwargs), text(&here, &kwargs));
    assert!(text(&here, &kwargs).unwrap().contains("0.30000000000000004"));
    let refuses = "{{ raise_exception('no <x>') }}";
    let there = compile(refuses, &Renderer::workers(program())).unwrap();
    assert!(matches!(render(&there, "", json!({})), Err(TextError::Refused(message)) if message == "no <x>"));
}

/// Cycles are never freed: a worker that has grown is replaced before that fails anything.
#[test]
fn leaks_do_not_add_up() {
    let renderer = Renderer::workers(program());
    let leak = "{% if messages[0].content == 'x' %}{% set ns = namespace() %}{% set ns.i = ns %}\
        {% set ns.s = 'x' * 60000000 %}{% endif %}";
    let template = compile(leak, &renderer).unwrap();
    for _ in 0..30 {
        assert_eq!(render(&template, "x", json!({})).unwrap(), "");
    }
}

#[test]
fn a_program_that_does_not_render_is_an_error_of_the_server() {
    for path in ["/nonexistent", "/bin/true"] {
        let program = WorkerProgram {
            path: path.into(),
            args: Vec::new(),
        };
        let error = compile("x", &Renderer::workers(program)).unwrap_err();
        assert!(
            matches!(error, TextError::Worker(_)) && !error.is_client_error(),
            "{path}: {error}"
        );
    }
}

#[test]
fn a_worker_needs_a_socket_and_ends_with_it() {
    let run = |stdin: Stdio| {
        let mut worker = Command::new(program().path);
        let status = worker.stdin(stdin).stderr(Stdio::null()).status();
        status.unwrap()
    };
    assert!(run(Stdio::null()).success() || cfg!(target_os = "linux"));
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    drop(ours);
    assert!(run(Stdio::from(std::os::fd::OwnedFd::from(theirs))).success());
}
