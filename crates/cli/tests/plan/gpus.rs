//! Plans for GPUs that are not on this machine.

use std::path::Path;

use serde_json::Value;

use super::{LLAMA_8B, json, model, number, plimsoll};

#[test]
fn a_gpu_that_is_not_here_can_be_planned_for() {
    let dir = model(LLAMA_8B);
    let flags = "--device cuda --max-model-len 4096 --mem-fraction 1.0 --json --device-memory";
    let plan = json(&plimsoll("plan", dir.path(), &format!("{flags} 150109880320")));
    // Where there is a GPU, it is looked at, and is smaller or larger.
    if plan["device"]["assumed"] == true {
        // What an H200 of so many bytes was measured to hold.
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/bench/h200/kv-full.json");
        let recorded: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let recorded = &recorded["plimsoll"]["profile"];
        for pointer in [
            "/kv_tokens",
            "/kv_bytes",
            "/scratch_bytes",
            "/arithmetic/non_kv",
            "/ready/reserved",
        ] {
            let error = number(&plan, pointer) / number(recorded, pointer) - 1.0;
            assert!(error.abs() < 0.03, "{pointer}: {error}");
        }
        assert!(plan["device"]["name"].as_str().unwrap().contains("not here"));
    }
    // Too small for the model, and it says with which exit code.
    let output = plimsoll("plan", dir.path(), &format!("{flags} 8GiB"));
    assert_eq!(output.status.code(), Some(4));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["fits"], false);
    assert!(
        document["error"].as_str().unwrap().contains("predicted"),
        "{document}"
    );
}

/// States are a component of a GPU too, in whole pages of memory.
#[test]
fn a_model_with_states_is_planned_for_on_a_gpu() {
    let config = include_str!("../../../model/tests/configs/Qwen3.5-27B.json");
    let dir = model(config);
    let flags = "--device cuda --max-model-len 8192 --json --device-memory 139GiB";
    let document = json(&plimsoll("plan", dir.path(), flags));
    if document["device"]["assumed"] != true {
        return;
    }
    let (slots, each) = (
        number(&document, "/states/slots"),
        number(&document, "/states/bytes_per_request"),
    );
    assert_eq!(each, 4.0 * 48.0 * (48.0 * 128.0 * 128.0 + 3.0 * 10_240.0));
    let components = document["ready"]["components"].as_array().unwrap();
    let states = components.iter().find(|line| line["name"] == "states").unwrap();
    let held = states["bytes"].as_u64().unwrap();
    assert_eq!(held, (slots as u64 * each as u64).next_multiple_of(2 << 20));
    // Each has the KV of half a mean request beside it. They are fewer than the default number of requests.
    assert!(slots > 160.0 && slots < 512.0, "{slots} slots");
    assert_eq!(number(&document, "/max_num_seqs"), slots);
    assert!(number(&document, "/kv_tokens") >= slots * 4096.0, "{document}");
    // With fewer requests at once, more slots are for snapshots alone, at most one for each request.
    for (requests, slots) in [(slots - 40.0, slots), (40.0, 80.0)] {
        let document = json(&plimsoll(
            "plan",
            dir.path(),
            &format!("{flags} --max-num-seqs {requests}"),
        ));
        assert_eq!(number(&document, "/states/slots"), slots);
        assert_eq!(number(&document, "/states/snapshots"), slots - requests);
    }
}

/// States and KV share an H200 to the byte: what holds no weight, no state of a request and no token is at most 2 % of it, but for what
/// `--mem-fraction` leaves.
#[test]
fn states_and_tokens_take_what_a_gpu_has() {
    const H200: u64 = 150_109_880_320;
    let dir = model(include_str!("../../../model/tests/configs/Qwen3.5-27B.json"));
    for more in [
        "--mem-fraction 1.0",
        "",
        "--max-num-seqs 64",
        "--no-enable-prefix-caching",
    ] {
        let flags = format!("--device cuda --max-model-len 32768 --json --device-memory {H200} {more}");
        let document = json(&plimsoll("plan", dir.path(), &flags));
        if document["device"]["assumed"] != true {
            return;
        }
        let bytes = |pointer: &str| document.pointer(pointer).and_then(Value::as_u64).expect(pointer);
        let components = document["ready"]["components"].as_array().unwrap();
        let held = |names: &[&str]| -> u64 {
            let of = components
                .iter()
                .filter(|line| names.contains(&line["name"].as_str().unwrap()));
            of.map(|line| line["bytes"].as_u64().unwrap()).sum()
        };
        let all: u64 = components
            .iter()
            .map(|line| line["bytes"].as_u64().unwrap())
            .sum();
        let (free, slack) = (bytes("/ready/free"), bytes("/ready/unattributed"));
        assert_eq!(
            all + slack + bytes("/ready/peers") + free,
            H200,
            "{more}: {document:#}"
        );
        assert_eq!(bytes("/ready/total"), H200, "{more}");
        // What requests can use, and what steps need.
        let used = bytes("/kv_tokens") * bytes("/kv_bytes_per_token")
            + bytes("/states/slots") * bytes("/states/bytes_per_request")
            + held(&["weights", "arena", "staging", "graphs", "runtime"]);
        let left = bytes("/arithmetic/room") - bytes("/arithmetic/pages") * bytes("/arithmetic/page_bytes");
        let is_whole = number(&document, "/arithmetic/mem_fraction") == 1.0;
        assert!(
            !is_whole || left < bytes("/arithmetic/page_bytes"),
            "{more}: {left}"
        );
        let lost = (H200 - used - left) as f64 / H200 as f64;
        assert!(
            (0.0..0.02).contains(&lost),
            "{more}: {lost} is lost: {document:#}"
        );
    }
}

/// A step has room for a chunk of a prompt beside one token of each other request, and defaults are chosen so.
#[test]
fn a_step_has_room_for_a_chunk_of_a_prompt_on_a_gpu() {
    let config = include_str!("../../../model/tests/configs/Qwen3.5-27B.json");
    let dir = model(config);
    let plan = |flags: &str| {
        let flags = format!("--device cuda --max-model-len 8192 --json --device-memory 139GiB {flags}");
        plimsoll("plan", dir.path(), &flags)
    };
    let most = |flags: &str| number(&json(&plan(flags)), "/max_num_seqs");
    assert_eq!(most("--max-num-batched-tokens 100"), 37.0);
    assert_eq!(most("--max-num-batched-tokens 100 --max-num-seqs 37"), 37.0);
    let output = plan("--max-num-batched-tokens 100 --max-num-seqs 38");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.contains("--max-num-batched-tokens") && error.contains("use at least 101"),
        "{error}"
    );
}

/// Of two GPUs each holds half the matrices and half the keys and values, and what sums are exchanged in.
#[test]
fn ranks_on_gpus_are_planned_without_them() {
    let dir = model(LLAMA_8B);
    let plan = |flags: &str| {
        let flags = format!("--device cuda --device-memory 80GiB --max-model-len 8192 {flags}");
        plimsoll("plan", dir.path(), &format!("{flags} --json"))
    };
    let [one, two] = [1, 2].map(|ranks| json(&plan(&format!("--tensor-parallel-size {ranks}"))));
    let bytes = |document: &Value, name: &str| {
        let parts = document["ready"]["components"].as_array().unwrap().iter();
        let mut parts = parts.filter(|part| part["name"] == name);
        parts.next().map_or(0, |part| part["bytes"].as_u64().unwrap())
    };
    let weights = [&one, &two].map(|document| bytes(document, "weights"));
    assert!(
        weights[1] * 2 >= weights[0] && weights[1] * 2 < weights[0] + (8 << 20),
        "{weights:?}"
    );
    let communication = [&one, &two].map(|document| bytes(document, "communication"));
    // With room for the rows of two steps.
    let rows = 2 * 8192 * 4096 * 2;
    assert_eq!(communication, [0, (82 << 20) + rows]);
    let tokens = [&one, &two].map(|document| number(document, "/kv_tokens"));
    assert!(tokens[1] > 2.0 * tokens[0], "{tokens:?}");
    // Numbers of ranks that GPUs do not have, or heads cannot be divided among.
    for (ranks, code) in [(3, 2), (6, 2)] {
        let refused = plan(&format!("--tensor-parallel-size {ranks}"));
        assert_eq!(refused.status.code(), Some(code));
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(text.contains("1, 2, 4 or 8 GPUs"), "{text}");
    }
}
