//! `/metrics`, `/memory`, models and version.

use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;

use crate::CHAT;
use crate::rig::{Rig, Setup, post};
use crate::{chat, with};

#[tokio::test]
async fn metrics_are_prometheus_text_under_both_names() {
    let rig = Rig::new(Setup::default());
    assert_eq!(rig.post(CHAT, chat("x")).await.status, 200);
    let page = rig.get("/metrics").await;
    assert_eq!(
        page.headers["content-type"],
        "text/plain; version=0.0.4; charset=utf-8"
    );
    let mut families = std::collections::HashMap::new();
    for line in page.text.lines().filter(|line| !line.is_empty()) {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(
                families.insert(name.to_owned(), kind.to_owned()),
                None,
                "{name} twice"
            );
        } else if !line.starts_with("# HELP ") {
            let (series, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
            let name = series.split('{').next().unwrap();
            let family = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| {
                let family = name.strip_suffix(suffix)?;
                (families.get(family)? == "histogram").then_some(family)
            });
            assert!(
                families.contains_key(family.unwrap_or(name)),
                "{line} has no type"
            );
        }
    }
    for (name, kind) in [
        ("vllm:num_requests_running", "gauge"),
        ("vllm:num_requests_waiting", "gauge"),
        ("vllm:kv_cache_usage_perc", "gauge"),
        ("vllm:cache_config_info", "gauge"),
        ("vllm:prompt_tokens_total", "counter"),
        ("vllm:generation_tokens_total", "counter"),
        ("vllm:num_preemptions_total", "counter"),
        ("vllm:request_success_total", "counter"),
        ("vllm:time_to_first_token_seconds", "histogram"),
        ("vllm:inter_token_latency_seconds", "histogram"),
        ("vllm:e2e_request_latency_seconds", "histogram"),
        ("vllm:iteration_tokens_total", "histogram"),
        ("plimsoll_device_memory_bytes", "gauge"),
        ("plimsoll_device_allocs_after_ready_total", "counter"),
        ("plimsoll_device_memory_used_high_bytes", "gauge"),
        ("plimsoll_device_memory_proved_peak_bytes", "gauge"),
        ("plimsoll_fragmentation_bytes", "gauge"),
        ("plimsoll_headroom_bytes", "gauge"),
        ("plimsoll_high_water_above_proof_total", "counter"),
        ("plimsoll_gpu_busy_seconds_total", "counter"),
        ("plimsoll_gpu_idle_seconds_total", "counter"),
    ] {
        assert_eq!(families.get(name).map(String::as_str), Some(kind), "{name}");
    }
    let value = |series: &str| {
        let line = page
            .text
            .lines()
            .find(|line| line.starts_with(series))
            .unwrap_or_else(|| panic!("{series}"));
        line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()
    };
    assert_eq!(value("vllm:generation_tokens_total"), 20.0);
    // Half a second of each step, without those of the profile.
    assert_eq!(
        value("plimsoll_gpu_busy_seconds_total"),
        value("plimsoll_steps_total") / 2.0
    );
    assert_eq!(
        value("plimsoll_gpu_idle_seconds_total"),
        value("plimsoll_steps_total") / 4.0
    );
    assert_eq!(value("vllm:time_to_first_token_seconds_count"), 1.0);
    assert_eq!(value("vllm:inter_token_latency_seconds_count"), 19.0);
    assert_eq!(value("plimsoll_request_generation_tokens_sum"), 20.0);
}

/// The value of the series with this name and all of these labels.
fn value(page: &str, name: &str, labels: &[&str]) -> f64 {
    let mut found = page.lines().filter_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        let rest = series.strip_prefix(name)?;
        (rest.starts_with('{') && labels.iter().all(|label| rest.contains(label)))
            .then(|| value.parse().unwrap())
    });
    found
        .next()
        .unwrap_or_else(|| panic!("no {name}{labels:?} in {page}"))
}

#[tokio::test]
async fn vllm_aliases_have_vllms_meaning() {
    let rig = Rig::new(Setup::default());
    let request = with(chat("x"), "n", json!(3));
    assert_eq!(rig.post(CHAT, request).await.status, 200);
    let page = rig.get("/metrics").await.text;
    for (name, bound) in [
        ("vllm:time_to_first_token_seconds_bucket", "le=\"0.02\""),
        ("vllm:inter_token_latency_seconds_bucket", "le=\"0.15\""),
        ("vllm:e2e_request_latency_seconds_bucket", "le=\"7680\""),
        ("vllm:request_queue_time_seconds_bucket", "le=\"0.3\""),
        ("vllm:request_prompt_tokens_bucket", "le=\"1000\""),
        ("vllm:request_params_n_bucket", "le=\"5\""),
    ] {
        // How many are below it depends on the machine.
        let below = value(&page, name, &[bound]);
        let all = value(&page, name, &["le=\"+Inf\""]);
        assert!((0.0..=all).contains(&below) && all > 0.0, "{name}");
    }
    assert!(!page.contains("le=\"2000\""), "no sequence has so many tokens");
    // Each choice is a request of the engine; `n` is recorded once per request.
    let success = |page: &str, reason: &str| {
        value(
            page,
            "vllm:request_success_total",
            &[&format!("finished_reason=\"{reason}\"")],
        )
    };
    assert_eq!(success(&page, "length"), 3.0);
    assert_eq!(value(&page, "vllm:request_params_n_count", &[]), 1.0);
    assert_eq!(value(&page, "vllm:request_params_n_sum", &[]), 3.0);
    assert_eq!((success(&page, "abort"), success(&page, "error")), (0.0, 0.0));

    rig.set_step(Duration::from_millis(5));
    let leaving = with(with(chat("x"), "stream", json!(true)), "max_tokens", json!(900));
    drop(rig.send(post(CHAT, leaving.to_string())).await);
    rig.until_in_flight(0).await;
    rig.script.panic.store(true, Ordering::SeqCst);
    assert_eq!(rig.post(CHAT, chat("x")).await.status, 500);
    let page = rig.get("/metrics").await.text;
    assert_eq!((success(&page, "abort"), success(&page, "error")), (1.0, 1.0));
    let started = value(&page, "plimsoll_start_time_seconds", &[]);
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs_f64();
    assert!((now - 3600.0..=now).contains(&started), "{started}");
}

#[tokio::test]
async fn memory_shows_report_and_meters() {
    let rig = Rig::new(Setup::default());
    let memory = rig.get("/memory").await.json();
    assert_eq!(memory["profile"]["phase"], "validate");
    assert_eq!(memory["now"]["components"]["kv"], 16384 * 64);
    assert_eq!(memory["device_allocs_after_ready"], 0);
    assert_eq!(memory["high_water_above_proof"], 0);
    let now = &memory["now"];
    assert_eq!(now["proved_peak"], now["reserved"]);
    assert_eq!(
        (&now["fragmentation"], &now["headroom"]),
        (&0.into(), &now["free"])
    );
}

/// Creeping memory is counted, once for each new peak.
#[tokio::test]
async fn a_step_above_the_validated_peak_is_counted() {
    let rig = Rig::new(Setup::default());
    let counted = async || rig.get("/memory").await.json()["high_water_above_proof"].clone();
    let body = || crate::with(chat("x"), "max_tokens", 1.into());
    assert_eq!(rig.post(CHAT, body()).await.status, 200);
    assert_eq!(counted().await, 0);
    for rises in 1..=2 {
        rig.script.high_water.fetch_add(1, Ordering::SeqCst);
        assert_eq!(rig.post(CHAT, chat("x")).await.status, 200);
        assert_eq!(counted().await, rises);
    }
    let page = rig.get("/metrics").await.text;
    assert!(page.contains(r#"plimsoll_high_water_above_proof_total{model_name="sim",engine="0"} 2"#));
}
