//! `plimsoll plan` and `plimsoll profile`, from outside.

mod gpus;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

const BINARY: &str = env!("CARGO_BIN_EXE_plimsoll");

/// The shape of Llama 3.1 8B.
const LLAMA_8B: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_act": "silu", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072,
    "tie_word_embeddings": false
}"#;

/// Two layers.
const TINY: &str = r#"{
    "architectures": ["Qwen2ForCausalLM"], "dtype": "float16", "hidden_act": "silu", "vocab_size": 300,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048,
    "tie_word_embeddings": true
}"#;

fn model(config: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    dir
}

fn default_model() -> PathBuf {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(
        path.exists(),
        "{} is missing: run scripts/fetch-default-model",
        path.display()
    );
    path
}

fn plimsoll(command: &str, model: &Path, flags: &str) -> Output {
    let locks = tempfile::tempdir().unwrap();
    Command::new(BINARY)
        .arg(command)
        .arg(model)
        .args(flags.split_whitespace())
        .arg("--device-lock-dir")
        .arg(locks.path())
        .arg("--no-profile-cache")
        .output()
        .unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The one document on stdout.
fn json(output: &Output) -> Value {
    serde_json::from_str(&stdout(output)).unwrap()
}

fn number(document: &Value, pointer: &str) -> f64 {
    let value = document.pointer(pointer).and_then(Value::as_f64);
    value.unwrap_or_else(|| panic!("no {pointer} in {document:#}"))
}

#[test]
fn a_plan_says_what_fits_and_how_to_serve_it() {
    let dir = model(TINY);
    let text = stdout(&plimsoll(
        "plan",
        dir.path(),
        "--device cpu --device-memory 24MiB --max-model-len 512 --max-num-seqs 100",
    ));
    for part in [
        "predicted for",
        "KiB of weights",
        "256 bytes of KV a token",
        "requests of 512 tokens",
        "limited by default",
        "free",
        "nothing was measured",
    ] {
        assert!(text.contains(part), "{part} is missing:\n{text}");
    }
    let serve = text.lines().last().unwrap();
    assert!(
        serve.contains(" serve ") && serve.contains("--max-model-len 512"),
        "{serve}"
    );
    assert!(text.is_ascii(), "it survives pipes");
}

#[test]
fn a_plan_takes_all_flags_of_serve_and_repeats_them() {
    let dir = model(TINY);
    let flags = "--json --device cpu --device-memory 24MiB --max-model-len 512";
    let plan = json(&plimsoll(
        "plan",
        dir.path(),
        &format!("{flags} --port 81 --api-key secret"),
    ));
    let command = plan["command"].as_str().unwrap();
    assert!(command.contains("--port 81 '--api-key=***'"), "{command}");
    let without = json(&plimsoll("plan", dir.path(), flags));
    assert_eq!(plan["kv_tokens"], without["kv_tokens"]);
}

#[test]
fn a_plan_says_that_serve_needs_a_tokenizer() {
    let dir = model(TINY);
    let flags = "--device cpu --device-memory 24MiB --max-model-len 512";
    let warned = |flags: &str| {
        let plan = plimsoll("plan", dir.path(), flags);
        assert!(plan.status.success());
        String::from_utf8(plan.stderr)
            .unwrap()
            .matches("no tokenizer.json")
            .count()
    };
    assert_eq!(warned(flags), 1);
    assert_eq!(
        warned(&format!("{flags} --load-format dummy")),
        0,
        "bytes are tokens"
    );
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    assert_eq!(warned(flags), 0);
}

/// On a CPU a larger budget is advised up to the machine's memory.
#[test]
fn no_more_memory_is_advised_than_the_machine_has() {
    let dir = model(TINY);
    for (context, is_advised) in [(1_u64 << 17, true), (1 << 28, false)] {
        let flags = format!(
            r#"--device cpu --device-memory 64MiB --hf-overrides {{"num_hidden_layers":64,"max_position_embeddings":{context}}}"#
        );
        let refused = plimsoll("plan", dir.path(), &flags);
        let text = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(4), "{text}");
        assert_eq!(text.contains("--device-memory="), is_advised, "{context}: {text}");
    }
}

#[test]
fn a_wrong_option_of_the_simulated_model_is_named() {
    let refused = plimsoll("plan", Path::new("sim:leak=1"), "");
    let text = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(
        text.contains("leak=1") && text.contains("window=TOKENS"),
        "{text}"
    );
}

/// Other programs need memory too: who wants more of it says so.
#[test]
fn a_cpu_holds_no_more_tokens_than_it_is_likely_to_use() {
    let dir = model(TINY);
    let long = r#"--hf-overrides {"max_position_embeddings":65536}"#;
    for (flags, tokens) in [
        ("--max-model-len 512 --max-num-seqs 8", 8 * 512),
        ("--max-model-len 512 --max-num-seqs 100", 32_768),
        (
            "--max-model-len 512 --max-num-seqs 100 --mem-fraction 0.95",
            51_200,
        ),
        (
            "--max-model-len 512 --max-num-seqs 100 --device-memory 64MiB",
            51_200,
        ),
        (
            "--max-model-len 512 --max-num-seqs 100 --max-total-token-num 40000",
            40_000,
        ),
        // One request of full length must fit.
        (long, 65_536),
    ] {
        let plan = json(&plimsoll(
            "plan",
            dir.path(),
            &format!("--device cpu --json {flags}"),
        ));
        assert_eq!(number(&plan, "/kv_tokens"), f64::from(tokens), "{flags}");
    }
}

/// Of more memory than this machine has, no other process holds a part.
#[test]
fn a_larger_machine_can_be_planned_for() {
    let dir = model(LLAMA_8B);
    let flags = "--device cpu --max-model-len 4096 --json --device-memory 16TiB";
    let plan = json(&plimsoll("plan", dir.path(), flags));
    assert_eq!(number(&plan, "/baseline/total"), (16_u64 << 40) as f64);
    assert_eq!(number(&plan, "/baseline/peers"), 0.0);
}

/// 6.98 billion weights of linear layers, and 1.05 billion of embedding and head, which stay in 16 bits.
#[test]
fn quantised_models_are_planned_for_in_their_bits() {
    let with = |field: &str| model(&LLAMA_8B.replacen('{', &format!("{{{field}, "), 1));
    let plain = model(LLAMA_8B);
    let block = with(r#""quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}"#);
    let awq = with(r#""quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}"#);
    let flags = "--device cuda --device-memory 80GiB --max-model-len 4096 --json";
    let quantise = "--quantization fp8";
    for (dir, more, name, bits) in [
        (&plain, "", None, 16.0),
        (&plain, quantise, Some("fp8-channel"), 9.05),
        (&block, "", Some("fp8-block"), 9.05),
        (&block, quantise, Some("fp8-block"), 9.05),
        (&awq, "", Some("int4-group-128"), 5.79),
    ] {
        let output = plimsoll("plan", dir.path(), &format!("{flags} {more}"));
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        if plan["device"]["assumed"] != true {
            return;
        }
        assert_eq!(plan["quantization"].as_str(), name, "{more}");
        let found = number(&plan, "/bits_per_weight");
        assert!((found - bits).abs() < 0.02, "{name:?}: {found}");
        // Keys and values in 8 bits, whatever the weights are in.
        let output = plimsoll(
            "plan",
            dir.path(),
            &format!("{flags} {more} --kv-cache-dtype fp8"),
        );
        let halved: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(halved["quantization"].as_str(), name, "{more}");
        for (pointer, ratio) in [("/kv_bytes_per_token", 0.5), ("/kv_tokens", 2.0)] {
            let found = number(&halved, pointer) / number(&plan, pointer);
            assert!(
                (found - ratio).abs() < 0.001 * ratio,
                "{name:?}: {pointer}: {found}"
            );
        }
    }
    let gptq = with(r#""quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": 128}"#);
    // Nothing is read before.
    std::fs::write(gptq.path().join("model.safetensors"), "not read").unwrap();
    for (dir, flags, code, message) in [
        (&gptq, "", 3, "`quantization_config.bits` is 8 bits"),
        (&awq, quantise, 2, "the model is stored in int4-group-128"),
        (
            &plain,
            "--device cpu --quantization fp8",
            2,
            "--quantization: quantising to fp8 needs a GPU",
        ),
    ] {
        let output = plimsoll("plan", dir.path(), flags);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains(message), "{error}");
    }
    for (model, flags) in [(plain.path(), "--quantization awq"), (Path::new("sim"), quantise)] {
        let output = plimsoll("plan", model, flags);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
}

/// In the types of its header, without a weight being read: those of its layers are kept in 5 bits, and so is the table, which is the head.
#[test]
fn gguf_files_are_planned_for_in_their_bits() {
    let flags = "--device cuda --device-memory 80GiB --max-model-len 4096 --json";
    let bits = |more: &str| {
        let output = plimsoll("plan", &default_model(), &format!("{flags} {more}"));
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        let is_assumed = plan["device"]["assumed"] == true;
        let name = plan["quantization"].as_str().map(str::to_owned);
        is_assumed.then(|| (name, number(&plan, "/bits_per_weight")))
    };
    let (Some((name, kept)), Some((online, fp8))) = (bits(""), bits("--quantization fp8")) else {
        return;
    };
    let name = name.unwrap();
    assert!(name.starts_with("Q4_1"), "{name}");
    // Rows of 576 inputs are filled up to 768.
    assert!((5.0..8.0).contains(&kept), "{kept}");
    assert_eq!(online.as_deref(), Some("fp8-channel"));
    assert!(fp8 > kept, "{fp8}, {kept}");
}

#[test]
fn a_plan_and_a_profile_of_the_same_model_agree() {
    let dir = model(TINY);
    let limits = "--device cpu --max-num-seqs 3 --max-num-batched-tokens 24 --max-model-len 128 --json";
    let cases = [
        (PathBuf::from("sim"), "--json".to_owned()),
        (
            dir.path().to_owned(),
            format!("{limits} --load-format dummy --device-memory 24MiB"),
        ),
        (default_model(), format!("{limits} --device-memory 1GiB")),
    ];
    for (model, flags) in cases {
        let plan = json(&plimsoll("plan", &model, &flags));
        let profile = json(&plimsoll("profile", &model, &flags));
        // What loading held, which a simulated model does not.
        let loading = |field: &str| profile["loading"][field].as_u64();
        assert_eq!(loading("peak").is_some(), model != Path::new("sim"), "{profile}");
        assert!(
            loading("peak") >= loading("weights") && loading("peak") <= loading("bound"),
            "{profile}"
        );
        for pointer in ["/kv_tokens", "/kv_bytes", "/ready/reserved", "/arithmetic/non_kv"] {
            let error = number(&plan, pointer) / number(&profile, pointer) - 1.0;
            assert!(error.abs() < 0.03, "{}: {pointer}: {error}", model.display());
        }
        // The plan is complete,
        assert_eq!(
            (&plan["fits"], &plan["device"]["kind"]),
            (&true.into(), &"cpu".into())
        );
        for pointer in [
            "/full_length_requests",
            "/kv_bytes_per_token",
            "/margins/canary_bytes",
            "/probe/peak_reserved",
        ] {
            assert!(number(&plan, pointer) > 0.0, "{pointer}");
        }
        assert!(plan["command"].as_str().unwrap().contains(" serve "));
        // and the profile has it beside what it measured.
        assert_eq!(profile["prediction"]["kv_tokens"], plan["kv_tokens"]);
        let compared = profile["prediction"]["compared"].as_array().unwrap();
        assert_eq!(compared[0]["name"], "kv tokens");
        assert!(
            compared
                .iter()
                .all(|line| line["error"].as_f64().is_none_or(|error| error.abs() < 0.03))
        );
    }
}

#[test]
fn a_profile_prints_how_far_off_the_prediction_is() {
    let text = stdout(&plimsoll("profile", Path::new("sim"), ""));
    assert!(text.contains("predicted") && text.contains("+0.00 %"), "{text}");
}

#[test]
fn what_does_not_fit_is_refused_with_the_same_advice() {
    let dir = model(TINY);
    let flags =
        "--device cpu --load-format dummy --max-num-seqs 3 --max-num-batched-tokens 24 --device-memory";
    for memory in ["100KiB", "1MiB", "2MiB"] {
        let [plan, profile] =
            ["plan", "profile"].map(|command| plimsoll(command, dir.path(), &format!("{flags} {memory}")));
        assert_eq!(
            (plan.status.code(), profile.status.code()),
            (Some(4), Some(4)),
            "{memory}"
        );
        assert!(plan.stdout.is_empty(), "{memory}");
        let advice = |output: &Output| String::from_utf8_lossy(&output.stderr).contains("--device-memory");
        assert!(advice(&plan) && advice(&profile), "{memory}: {plan:?}");
    }
}

#[test]
fn what_is_no_model_is_said_with_its_exit_code() {
    let empty = tempfile::tempdir().unwrap();
    let unknown = model(&TINY.replace("Qwen2ForCausalLM", "NobodyForCausalLM"));
    let cases = [
        (Path::new("./nowhere"), 3),
        (empty.path(), 3),
        (unknown.path(), 3),
        (Path::new("owner/name:Q4_K_M"), 3),
    ];
    for (model, code) in cases {
        let output = plimsoll("plan", model, "");
        assert_eq!(
            output.status.code(),
            Some(code),
            "{}: {output:?}",
            model.display()
        );
    }
    let output = plimsoll("plan", Path::new("sim"), "--device cuda");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_field_that_is_not_known_is_named_before_weights_are_read() {
    let model = model(&TINY.replacen('{', r#"{"num_experts": 8, "#, 1));
    std::fs::write(model.path().join("model.safetensors"), "not read").unwrap();
    for command in ["plan", "profile"] {
        let output = plimsoll(command, model.path(), "");
        assert_eq!(output.status.code(), Some(3), "{command}: {output:?}");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains("`num_experts` is 8"), "{command}: {error}");
    }
}

/// What was measured of the worst step bounds the budget from above; what is predicted stands beside it, and is enough.
#[test]
fn a_budget_for_weights_alone_leads_to_one_that_serves() {
    let tight = plimsoll("profile", &default_model(), "--device cpu --device-memory 100MiB");
    assert_eq!(tight.status.code(), Some(4));
    let said = String::from_utf8(tight.stderr).unwrap();
    let advice = said.split_once("# a larger budget, as predicted").expect(&said).1;
    assert!(advice.contains("# a larger budget, an upper bound"), "{said}");
    let (_, flag) = advice
        .lines()
        .nth(1)
        .unwrap()
        .split_once("--device-memory=")
        .unwrap();
    let flags = format!("--device cpu --device-memory {flag}");
    stdout(&plimsoll("profile", &default_model(), &flags));
    // No larger than it has to be.
    let bytes: u64 = flag.strip_suffix("MiB").unwrap().parse().unwrap();
    assert!((300..400).contains(&bytes), "{flag}");
}
