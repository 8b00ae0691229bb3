//! Flags of other servers that are none here, and what to do instead. `docs/operations.md` has the same as tables.

use std::ffi::OsString;

use super::known;

/// Server, its flags, and what to do instead.
type Strangers = (&'static str, &'static [&'static str], &'static str);

const VLLM: &str = "vLLM";
const SGLANG: &str = "SGLang";
const TGI: &str = "TGI";
const LIGHTLLM: &str = "LightLLM";

const ONE_DEVICE: &str = "a server uses one device; start one for each, with --device cuda:N and --port, and a load balancer before them";
const WEIGHTS_SAY: &str = "the weights' files say how they are quantised; leave the flag out";
const NO_REMOTE_CODE: &str = "no code of a model is ever run; leave the flag out";
const NO_SWAP: &str = "nothing is swapped: what is preempted is computed again; leave the flag out";
const NO_LORA: &str = "adapters are not served; merge them into the weights";
const NO_SPECULATION: &str = "there is no speculative decoding; leave the flag out";
const NO_IMAGES: &str = "models see text alone; leave the flag out";
const ALWAYS: &str = "this is always on; leave the flag out";
const FOUND: &str = "this is found by measuring at the start; leave the flag out";
const CHOSEN: &str = "kernels are chosen by measuring at the start; leave the flag out";
const GRAMMARS: &str =
    "there is one engine for structured outputs, and it is always there; leave the flag out";
const GRAPHS: &str = "batch sizes of graphs are chosen at the start; --enforce-eager does without graphs";
const ONE_PROCESS: &str =
    "one process serves the API with as many threads as there are cores; leave the flag out";
const PROXY: &str = "let a proxy before the server do this; leave the flag out";
const AS_FOUND: &str = "the model's files are read as what they are; leave the flag out";
const STAYS: &str = "the KV cache stays in its server; --kv-events-config tells routers what is in it";
const POLICY: &str = "use --scheduling-policy: fcfs or priority; the prefix cache needs no other order";

const STRANGERS: &[Strangers] = &[
    (
        VLLM,
        &[
            "tensor-parallel-size",
            "tp",
            "pipeline-parallel-size",
            "pp",
            "data-parallel-size",
            "dp",
            "enable-expert-parallel",
            "distributed-executor-backend",
            "headless",
            "nnodes",
            "node-rank",
            "master-addr",
            "master-port",
        ],
        ONE_DEVICE,
    ),
    (VLLM, &["quantization", "q"], WEIGHTS_SAY),
    (VLLM, &["trust-remote-code"], NO_REMOTE_CODE),
    (
        VLLM,
        &["swap-space", "cpu-offload-gb", "kv-offloading-size"],
        NO_SWAP,
    ),
    (
        VLLM,
        &[
            "enable-lora",
            "lora-modules",
            "max-loras",
            "max-lora-rank",
            "max-cpu-loras",
        ],
        NO_LORA,
    ),
    (
        VLLM,
        &[
            "speculative-config",
            "speculative-model",
            "num-speculative-tokens",
        ],
        NO_SPECULATION,
    ),
    (
        VLLM,
        &[
            "limit-mm-per-prompt",
            "mm-processor-kwargs",
            "allowed-local-media-path",
        ],
        NO_IMAGES,
    ),
    (
        VLLM,
        &[
            "enable-chunked-prefill",
            "async-scheduling",
            "enable-prompt-tokens-details",
            "enable-request-id-headers",
            "enable-ssl-refresh",
            "use-v2-block-manager",
        ],
        ALWAYS,
    ),
    (VLLM, &["attention-backend"], CHOSEN),
    (
        VLLM,
        &["structured-outputs-config", "guided-decoding-backend"],
        GRAMMARS,
    ),
    (
        VLLM,
        &[
            "compilation-config",
            "max-seq-len-to-capture",
            "cuda-graph-sizes",
            "cudagraph-capture-sizes",
        ],
        GRAPHS,
    ),
    (
        VLLM,
        &["uds", "root-path", "middleware", "ssl-ca-certs", "ssl-cert-reqs"],
        PROXY,
    ),
    (
        VLLM,
        &["tokenizer-mode", "config-format", "hf-config-path"],
        AS_FOUND,
    ),
    (VLLM, &["kv-transfer-config"], STAYS),
    (VLLM, &["api-server-count"], ONE_PROCESS),
    (
        VLLM,
        &["num-gpu-blocks-override"],
        "use --max-total-token-num: tokens in place of blocks, so multiply by --block-size",
    ),
    (VLLM, &["task"], "use --runner: generate or pooling"),
    (VLLM, &["uvicorn-log-level"], "use --log-level"),
    (
        VLLM,
        &["enable-log-requests", "disable-log-requests", "max-log-len"],
        "use --request-log-rate, which is 0 for no lines; prompts are never logged",
    ),
    (
        VLLM,
        &["disable-uvicorn-access-log"],
        "there is no such log unless --access-log asks for it; leave the flag out",
    ),
    (
        VLLM,
        &["disable-log-stats"],
        "statistics are metrics, at /metrics; leave the flag out",
    ),
    (VLLM, &["disable-fastapi-docs"], "use --disable-ui"),
    (
        VLLM,
        &["tokenizer-revision", "code-revision"],
        "--revision is that of the whole repository",
    ),
    (
        VLLM,
        &["override-generation-config"],
        "use --generation-config with a directory that holds a generation_config.json",
    ),
    (SGLANG, &["model-path"], "use --model"),
    (TGI, &["model-id"], "use --model"),
    (LIGHTLLM, &["model-dir"], "use --model"),
    (SGLANG, &["tokenizer-path"], "use --tokenizer"),
    (LIGHTLLM, &["model-name"], "use --served-model-name"),
    (SGLANG, &["context-length"], "use --max-model-len"),
    (
        TGI,
        &["max-total-tokens", "max-input-tokens", "max-input-length"],
        "use --max-model-len: prompt and output together",
    ),
    (LIGHTLLM, &["max-req-total-len"], "use --max-model-len"),
    (SGLANG, &["max-running-requests"], "use --max-num-seqs"),
    (TGI, &["max-batch-size"], "use --max-num-seqs"),
    (LIGHTLLM, &["running-max-req-size"], "use --max-num-seqs"),
    (
        SGLANG,
        &["chunked-prefill-size", "max-prefill-tokens"],
        "use --max-num-batched-tokens",
    ),
    (TGI, &["max-batch-prefill-tokens"], "use --max-num-batched-tokens"),
    (
        LIGHTLLM,
        &["batch-max-tokens", "chunked-prefill-size"],
        "use --max-num-batched-tokens",
    ),
    (
        SGLANG,
        &["max-total-tokens"],
        "use --max-total-token-num, or leave it out: it is measured",
    ),
    (
        TGI,
        &["max-batch-total-tokens"],
        "use --max-total-token-num, or leave it out: it is measured",
    ),
    (
        SGLANG,
        &["mem-fraction-static"],
        "use --gpu-memory-utilization, which holds for all the server has and not for weights and KV alone",
    ),
    (TGI, &["cuda-memory-fraction"], "use --gpu-memory-utilization"),
    (SGLANG, &["page-size"], "use --block-size"),
    (SGLANG, &["random-seed"], "use --seed"),
    (SGLANG, &["disable-radix-cache"], "use --no-enable-prefix-caching"),
    (
        LIGHTLLM,
        &["disable-dynamic-prompt-cache"],
        "use --no-enable-prefix-caching",
    ),
    (SGLANG, &["disable-cuda-graph"], "use --enforce-eager"),
    (LIGHTLLM, &["disable-cudagraph"], "use --enforce-eager"),
    (SGLANG, &["enable-memory-saver"], "use --enable-sleep-mode"),
    (SGLANG, &["max-queued-requests"], "use --max-queue"),
    (
        TGI,
        &["max-concurrent-requests"],
        "use --max-queue, which counts those that wait beside --max-num-seqs that run",
    ),
    (SGLANG, &["schedule-policy"], POLICY),
    (SGLANG, &["is-embedding"], "use --runner pooling"),
    (SGLANG, &["json-model-override-args"], "use --hf-overrides"),
    (SGLANG, &["base-gpu-id"], "use --device cuda:N"),
    (LIGHTLLM, &["data-type"], "use --dtype"),
    (TGI, &["hostname"], "use --host"),
    (TGI, &["cors-allow-origin"], "use --allowed-origins"),
    (TGI, &["payload-limit"], "use --max-body-size"),
    (TGI, &["huggingface-hub-cache"], "use --download-dir"),
    (
        TGI,
        &["tokenizer-config-path"],
        "use --chat-template, with the template itself",
    ),
    (TGI, &["json-output"], "use --log-format json"),
    (
        TGI,
        &["otlp-endpoint"],
        "use --otlp-traces-endpoint, which speaks HTTP",
    ),
    (
        SGLANG,
        &["log-requests", "log-requests-level"],
        "use --request-log-rate; prompts are never logged",
    ),
    (SGLANG, &["enable-metrics"], ALWAYS),
    (
        SGLANG,
        &["tp-size", "dp-size", "pp-size", "ep-size", "tensor-parallel-size"],
        ONE_DEVICE,
    ),
    (TGI, &["num-shard", "sharded"], ONE_DEVICE),
    (LIGHTLLM, &["tp", "dp", "nccl-port"], ONE_DEVICE),
    (SGLANG, &["quantization"], WEIGHTS_SAY),
    (TGI, &["quantize"], WEIGHTS_SAY),
    (LIGHTLLM, &["quant-type", "mode"], WEIGHTS_SAY),
    (SGLANG, &["speculative-algorithm"], NO_SPECULATION),
    (TGI, &["speculate"], NO_SPECULATION),
    (SGLANG, &["lora-paths"], NO_LORA),
    (TGI, &["lora-adapters"], NO_LORA),
    (
        SGLANG,
        &["cuda-graph-max-bs", "cuda-graph-bs", "enable-torch-compile"],
        GRAPHS,
    ),
    (TGI, &["cuda-graphs"], GRAPHS),
    (
        LIGHTLLM,
        &["graph-max-batch-size", "graph-max-len-in-batch"],
        GRAPHS,
    ),
    (SGLANG, &["attention-backend", "sampling-backend"], CHOSEN),
    (SGLANG, &["grammar-backend"], GRAMMARS),
    (SGLANG, &["schedule-conservativeness"], FOUND),
    (TGI, &["waiting-served-ratio", "max-waiting-tokens"], FOUND),
    (
        LIGHTLLM,
        &["router-token-ratio", "router-max-new-token-len"],
        FOUND,
    ),
    (TGI, &["validation-workers"], ONE_PROCESS),
    (LIGHTLLM, &["httpserver-workers"], ONE_PROCESS),
];

/// What to do instead of the flag `name`, without dashes, if it is one of another server.
pub fn advice(name: &str) -> Option<String> {
    // vLLM's switches have opposites.
    let positive = name.strip_prefix("no-").unwrap_or(name);
    let mut servers: Vec<(&str, Vec<&str>)> = Vec::new();
    for (server, _, advice) in STRANGERS.iter().filter(|(_, flags, _)| flags.contains(&positive)) {
        match servers.iter_mut().find(|(of, _)| of == advice) {
            Some((_, names)) => names.push(server),
            None => servers.push((advice, vec![server])),
        }
    }
    let advice: Vec<String> = servers
        .iter()
        .map(|(advice, names)| format!("a flag of {}: {advice}", names.join(" and ")))
        .collect();
    (!advice.is_empty()).then(|| advice.join("; "))
}

/// The flags of other servers on a command line as they stand there, each with what to do instead.
pub(super) fn on(argv: &[OsString]) -> Vec<(String, String)> {
    let flags = argv.iter().skip(1).map_while(|word| word.to_str());
    flags
        .take_while(|word| *word != "--")
        .filter_map(|word| {
            let flag = word.split('=').next().unwrap_or(word);
            let name = flag.strip_prefix("--").or_else(|| flag.strip_prefix('-'))?;
            known(name).err()?;
            Some((flag.to_owned(), advice(name)?))
        })
        .collect()
}

/// Every flag of another server that is none here, without dashes.
pub fn strangers() -> impl Iterator<Item = &'static str> {
    all().map(|(flag, _)| flag)
}

/// With what to do instead.
pub(super) fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    STRANGERS
        .iter()
        .flat_map(|(_, flags, advice)| flags.iter().map(move |flag| (*flag, *advice)))
}
