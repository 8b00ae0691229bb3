//! Flags of other servers that are none here.

/// Server, its flags, and what to do instead.
pub(super) type Strangers = (&'static str, &'static str, &'static str);

const VLLM: &str = "vLLM";
const SGLANG: &str = "SGLang";
const TGI: &str = "TGI";
const LIGHTLLM: &str = "LightLLM";

const ONE_DEVICE: &str = "a server uses one device: leave the flag out where it says 1; for more, start a server on each, with --device cuda:N and \
     --port, and put a load balancer before them";
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

const NO_FOREIGN_CODE: &str = "no code of others is ever run; leave the flag out";
const ROPE: &str = "the model's config.json says it: write it there, as rope_scaling";
const CLIENTS_ASK: &str = "clients ask for it, request by request; leave the flag out";
const METERS: &str = "what is measured is at /metrics and /memory; leave the flag out";
const API_BOUNDS: &str = "such bounds are those of the API; leave the flag out";
const ANY_METHOD: &str = "allowed origins may use every method and header; leave the flag out";
const SEND_NOTHING: &str = "nothing is ever sent home; leave the flag out";

/// Those that operators meet most, which `docs/operations.md` has as tables.
pub(super) const KNOWN: &[Strangers] = &[
    (
        VLLM,
        "tensor-parallel-size tp pipeline-parallel-size pp data-parallel-size dp enable-expert-parallel \
         distributed-executor-backend headless nnodes node-rank master-addr master-port",
        ONE_DEVICE,
    ),
    (VLLM, "quantization q", WEIGHTS_SAY),
    (VLLM, "trust-remote-code", NO_REMOTE_CODE),
    (VLLM, "swap-space cpu-offload-gb kv-offloading-size", NO_SWAP),
    (
        VLLM,
        "enable-lora lora-modules max-loras max-lora-rank max-cpu-loras",
        NO_LORA,
    ),
    (
        VLLM,
        "speculative-config speculative-model num-speculative-tokens",
        NO_SPECULATION,
    ),
    (
        VLLM,
        "limit-mm-per-prompt mm-processor-kwargs allowed-local-media-path",
        NO_IMAGES,
    ),
    (
        VLLM,
        "enable-chunked-prefill async-scheduling enable-prompt-tokens-details enable-request-id-headers \
         enable-ssl-refresh use-v2-block-manager",
        ALWAYS,
    ),
    (VLLM, "attention-backend", CHOSEN),
    (
        VLLM,
        "structured-outputs-config guided-decoding-backend",
        GRAMMARS,
    ),
    (
        VLLM,
        "compilation-config max-seq-len-to-capture cuda-graph-sizes cudagraph-capture-sizes",
        GRAPHS,
    ),
    (VLLM, "uds root-path middleware ssl-ca-certs ssl-cert-reqs", PROXY),
    (VLLM, "tokenizer-mode config-format hf-config-path", AS_FOUND),
    (VLLM, "kv-transfer-config", STAYS),
    (VLLM, "api-server-count", ONE_PROCESS),
    (
        VLLM,
        "num-gpu-blocks-override",
        "use --max-total-token-num: tokens in place of blocks, so multiply by --block-size",
    ),
    (VLLM, "task", "use --runner: generate or pooling"),
    (VLLM, "uvicorn-log-level", "use --log-level"),
    (
        VLLM,
        "enable-log-requests disable-log-requests max-log-len",
        "use --request-log-rate, which is 0 for no lines; prompts are never logged",
    ),
    (
        VLLM,
        "disable-uvicorn-access-log",
        "there is no such log unless --access-log asks for it; leave the flag out",
    ),
    (
        VLLM,
        "disable-log-stats",
        "statistics are metrics, at /metrics; leave the flag out",
    ),
    (VLLM, "disable-fastapi-docs", "use --disable-ui"),
    (
        VLLM,
        "tokenizer-revision code-revision",
        "--revision is that of the whole repository",
    ),
    (
        VLLM,
        "override-generation-config",
        "use --generation-config with a directory that holds a generation_config.json",
    ),
    (SGLANG, "model-path", "use --model"),
    (TGI, "model-id", "use --model"),
    (LIGHTLLM, "model-dir", "use --model"),
    (SGLANG, "tokenizer-path", "use --tokenizer"),
    (LIGHTLLM, "model-name", "use --served-model-name"),
    (SGLANG, "context-length", "use --max-model-len"),
    (
        TGI,
        "max-total-tokens max-input-tokens max-input-length",
        "use --max-model-len: prompt and output together",
    ),
    (LIGHTLLM, "max-req-total-len", "use --max-model-len"),
    (SGLANG, "max-running-requests", "use --max-num-seqs"),
    (TGI, "max-batch-size", "use --max-num-seqs"),
    (LIGHTLLM, "running-max-req-size", "use --max-num-seqs"),
    (
        SGLANG,
        "chunked-prefill-size max-prefill-tokens",
        "use --max-num-batched-tokens",
    ),
    (TGI, "max-batch-prefill-tokens", "use --max-num-batched-tokens"),
    (
        LIGHTLLM,
        "batch-max-tokens chunked-prefill-size",
        "use --max-num-batched-tokens",
    ),
    (
        SGLANG,
        "max-total-tokens",
        "use --max-total-token-num, or leave it out: it is measured",
    ),
    (
        TGI,
        "max-batch-total-tokens",
        "use --max-total-token-num, or leave it out: it is measured",
    ),
    (
        SGLANG,
        "mem-fraction-static",
        "use --gpu-memory-utilization, which holds for all the server has and not for weights and KV alone",
    ),
    (TGI, "cuda-memory-fraction", "use --gpu-memory-utilization"),
    (SGLANG, "page-size", "use --block-size"),
    (SGLANG, "random-seed", "use --seed"),
    (SGLANG, "disable-radix-cache", "use --no-enable-prefix-caching"),
    (
        LIGHTLLM,
        "disable-dynamic-prompt-cache",
        "use --no-enable-prefix-caching",
    ),
    (SGLANG, "disable-cuda-graph", "use --enforce-eager"),
    (LIGHTLLM, "disable-cudagraph", "use --enforce-eager"),
    (SGLANG, "enable-memory-saver", "use --enable-sleep-mode"),
    (SGLANG, "max-queued-requests", "use --max-queue"),
    (
        TGI,
        "max-concurrent-requests",
        "use --max-queue, which counts those that wait beside --max-num-seqs that run",
    ),
    (SGLANG, "schedule-policy", POLICY),
    (SGLANG, "is-embedding", "use --runner pooling"),
    (SGLANG, "json-model-override-args", "use --hf-overrides"),
    (SGLANG, "base-gpu-id", "use --device cuda:N"),
    (LIGHTLLM, "data-type", "use --dtype"),
    (TGI, "hostname", "use --host"),
    (TGI, "cors-allow-origin", "use --allowed-origins"),
    (TGI, "payload-limit", "use --max-body-size"),
    (TGI, "huggingface-hub-cache", "use --download-dir"),
    (
        TGI,
        "tokenizer-config-path",
        "use --chat-template, with the template itself",
    ),
    (TGI, "json-output", "use --log-format json"),
    (
        TGI,
        "otlp-endpoint",
        "use --otlp-traces-endpoint, which speaks HTTP",
    ),
    (
        SGLANG,
        "log-requests log-requests-level",
        "use --request-log-rate; prompts are never logged",
    ),
    (SGLANG, "enable-metrics", ALWAYS),
    (
        SGLANG,
        "tp-size dp-size pp-size ep-size tensor-parallel-size",
        ONE_DEVICE,
    ),
    (TGI, "num-shard sharded", ONE_DEVICE),
    (LIGHTLLM, "tp dp nccl-port", ONE_DEVICE),
    (SGLANG, "quantization", WEIGHTS_SAY),
    (TGI, "quantize", WEIGHTS_SAY),
    (LIGHTLLM, "quant-type mode", WEIGHTS_SAY),
    (SGLANG, "speculative-algorithm", NO_SPECULATION),
    (TGI, "speculate", NO_SPECULATION),
    (SGLANG, "lora-paths", NO_LORA),
    (TGI, "lora-adapters", NO_LORA),
    (
        SGLANG,
        "cuda-graph-max-bs cuda-graph-bs enable-torch-compile",
        GRAPHS,
    ),
    (TGI, "cuda-graphs", GRAPHS),
    (LIGHTLLM, "graph-max-batch-size graph-max-len-in-batch", GRAPHS),
    (SGLANG, "attention-backend sampling-backend", CHOSEN),
    (SGLANG, "grammar-backend", GRAMMARS),
    (SGLANG, "schedule-conservativeness", FOUND),
    (TGI, "waiting-served-ratio max-waiting-tokens", FOUND),
    (LIGHTLLM, "router-token-ratio router-max-new-token-len", FOUND),
    (TGI, "validation-workers", ONE_PROCESS),
    (LIGHTLLM, "httpserver-workers", ONE_PROCESS),
];

/// The others.
pub(super) const RARE: &[Strangers] = &[
    (
        VLLM,
        "decode-context-parallel-size dcp prefill-context-parallel-size pcp data-parallel-rank dpn \
         data-parallel-start-rank dpr data-parallel-size-local dpl data-parallel-address dpa \
         data-parallel-rpc-port dpp data-parallel-backend dpb data-parallel-hybrid-lb dph \
         data-parallel-external-lb dpe ep enable-eplb eplb-config enable-dbo expert-placement-strategy \
         all2all-backend disable-custom-all-reduce worker-use-ray engine-use-ray ray-workers-use-nsight \
         max-parallel-loading-workers disable-nccl-for-dp-synchronization n r",
        ONE_DEVICE,
    ),
    (
        VLLM,
        "kv-offloading-backend cpu-offload-params preemption-mode",
        NO_SWAP,
    ),
    (
        VLLM,
        "fully-sharded-loras lora-dtype lora-extra-vocab-size lora-target-modules default-mm-loras \
         enable-prompt-adapter max-prompt-adapters",
        NO_LORA,
    ),
    (
        VLLM,
        "sc speculative-draft-tensor-parallel-size ngram-prompt-lookup-max ngram-prompt-lookup-min",
        NO_SPECULATION,
    ),
    (
        VLLM,
        "allowed-media-domains media-io-kwargs interleave-mm-strings enable-mm-embeds mm-encoder-tp-mode \
         mm-encoder-attn-backend mm-processor-cache-gb mm-processor-cache-type mm-encoder-only \
         disable-mm-preprocessor-cache skip-mm-profiling video-pruning-rate language-model-only",
        NO_IMAGES,
    ),
    (
        VLLM,
        "enable-reasoning",
        "--reasoning-parser does it alone; leave the flag out",
    ),
    (
        VLLM,
        "default-chat-template-kwargs",
        "clients send chat_template_kwargs with a request; leave the flag out",
    ),
    (
        VLLM,
        "chat-template-content-format tokenizer-pool-size model-impl ignore-patterns \
         model-loader-extra-config safetensors-load-strategy pt-load-map-location use-tqdm-on-load \
         skip-tokenizer-init disable-sliding-window quantization-param-path calculate-kv-scales \
         override-attention-dtype",
        AS_FOUND,
    ),
    (VLLM, "convert", "use --runner: generate or pooling"),
    (VLLM, "rope-scaling rope-theta", ROPE),
    (
        VLLM,
        "tool-parser-plugin reasoning-parser-plugin logits-processors logits-processor-pattern \
         io-processor-plugin tool-server worker-cls worker-extension-cls scheduler-cls",
        NO_FOREIGN_CODE,
    ),
    (VLLM, "disable-frontend-multiprocessing asc", ONE_PROCESS),
    (
        VLLM,
        "max-logprobs",
        "logprobs, top_logprobs and prompt_logprobs go up to 20; leave the flag out",
    ),
    (
        VLLM,
        "return-tokens-as-token-ids enable-force-include-usage exclude-tools-when-tool-choice-none",
        CLIENTS_ASK,
    ),
    (
        VLLM,
        "logprobs-mode",
        "log-probabilities are those after penalties and before temperature; leave the flag out",
    ),
    (
        VLLM,
        "response-role",
        "answers have the role assistant; leave the flag out",
    ),
    (
        VLLM,
        "num-scheduler-steps multi-step-stream-outputs num-lookahead-slots scheduler-delay-factor \
         long-prefill-token-threshold max-num-partial-prefills max-long-partial-prefills \
         disable-chunked-mm-input disable-async-output-proc disable-hybrid-kv-cache-manager \
         scheduler-reserve-full-isl performance-mode",
        FOUND,
    ),
    (
        VLLM,
        "stream-interval",
        "each token is sent as soon as it is there; leave the flag out",
    ),
    (
        VLLM,
        "prefix-caching-hash-algo",
        "the prefix cache needs none; leave the flag out",
    ),
    (VLLM, "moe-backend disable-cascade-attn", CHOSEN),
    (
        VLLM,
        "cc O O0 O1 O2 O3 optimization-level max-cudagraph-capture-size kernel-config",
        GRAPHS,
    ),
    (
        VLLM,
        "reasoning-config guided-decoding-disable-fallback guided-decoding-disable-any-whitespace \
         guided-decoding-disable-additional-properties",
        GRAMMARS,
    ),
    (
        VLLM,
        "allow-credentials allowed-methods allowed-headers",
        ANY_METHOD,
    ),
    (
        VLLM,
        "h11-max-incomplete-event-size h11-max-header-count ssl-ciphers enable-offline-docs",
        PROXY,
    ),
    (VLLM, "log-config-file", "use --log-format and --log-level"),
    (
        VLLM,
        "disable-access-log-for-endpoints",
        "there is no such log unless --access-log asks for it; leave the flag out",
    ),
    (
        VLLM,
        "enable-log-outputs enable-log-deltas",
        "what models say is never logged; leave the flag out",
    ),
    (
        VLLM,
        "enable-server-load-tracking kv-cache-metrics kv-cache-metrics-sample cudagraph-metrics \
         enable-mfu-metrics enable-logging-iteration-details collect-detailed-traces \
         show-hidden-metrics-for-version enable-layerwise-nvtx-tracing profiler-config \
         aggregate-engine-logging",
        METERS,
    ),
    (VLLM, "ec-transfer-config", STAYS),
    (
        VLLM,
        "enable-tokenizer-info-endpoint",
        "there is no such endpoint; /tokenize and /detokenize are always there",
    ),
    (
        SGLANG,
        "dist-init-addr nccl-init-addr dist-timeout enable-dp-attention enable-dp-lm-head enable-p2p-check \
         load-balance-method moe-dense-tp-size moe-a2a-backend deepep-mode ep-num-redundant-experts \
         enable-eplb expert-parallel-size data-parallel-size pipeline-parallel-size gpu-id-step \
         disable-custom-all-reduce enable-nccl-nvls enable-mscclpp",
        ONE_DEVICE,
    ),
    (
        SGLANG,
        "disaggregation-mode disaggregation-transfer-backend disaggregation-bootstrap-port \
         disaggregation-ib-device",
        STAYS,
    ),
    (
        SGLANG,
        "enable-hierarchical-cache hicache-ratio hicache-size hicache-write-policy hicache-io-backend \
         hicache-mem-layout hicache-storage-backend enable-lmcache cpu-offload-gb",
        NO_SWAP,
    ),
    (
        SGLANG,
        "speculative-draft-model-path speculative-num-steps speculative-eagle-topk \
         speculative-num-draft-tokens speculative-token-map",
        NO_SPECULATION,
    ),
    (
        SGLANG,
        "max-loras-per-batch max-loaded-loras lora-backend lora-target-modules",
        NO_LORA,
    ),
    (
        SGLANG,
        "enable-multimodal mm-attention-backend keep-mm-feature-on-device",
        NO_IMAGES,
    ),
    (SGLANG, "tokenizer-worker-num detokenizer-worker-num", ONE_PROCESS),
    (
        SGLANG,
        "enable-mixed-chunk enable-cache-report disable-overlap-schedule enable-deterministic-inference \
        ",
        ALWAYS,
    ),
    (
        SGLANG,
        "allow-auto-truncate",
        "clients ask for it, by truncate_prompt_tokens; else a prompt that is too long gets a 400",
    ),
    (
        SGLANG,
        "skip-server-warmup",
        "the worst steps run before the server is ready; leave the flag out",
    ),
    (
        SGLANG,
        "enable-priority-scheduling",
        "use --scheduling-policy priority",
    ),
    (
        SGLANG,
        "sampling-defaults preferred-sampling-params",
        "use --generation-config",
    ),
    (
        SGLANG,
        "log-level-http",
        "use --log-level, and --access-log for a line per request",
    ),
    (SGLANG, "soft-watchdog-timeout", "use --stall-timeout"),
    (
        SGLANG,
        "prefill-attention-backend decode-attention-backend triton-attention-num-kv-splits \
         triton-attention-reduce-in-fp32 fp8-gemm-backend moe-runner-backend",
        CHOSEN,
    ),
    (
        SGLANG,
        "disable-cuda-graph-padding enable-piecewise-cuda-graph torch-compile-max-bs \
         enable-profile-cuda-graph",
        GRAPHS,
    ),
    (
        SGLANG,
        "torchao-config quantization-param-path modelopt-quant",
        WEIGHTS_SAY,
    ),
    (
        SGLANG,
        "constrained-json-whitespace-pattern constrained-json-disable-any-whitespace",
        GRAMMARS,
    ),
    (
        SGLANG,
        "decode-log-interval show-time-cost enable-request-time-stats-logging \
         enable-metrics-for-all-schedulers collect-tokens-histogram bucket-time-to-first-token \
         bucket-inter-token-latency bucket-e2e-request-latency",
        METERS,
    ),
    (
        SGLANG,
        "model-loader-extra-config completion-template skip-tokenizer-init",
        AS_FOUND,
    ),
    (
        SGLANG,
        "prefill-max-requests num-continuous-decode-steps swa-full-tokens-ratio stream-interval \
         radix-eviction-policy",
        FOUND,
    ),
    (SGLANG, "fastapi-root-path", PROXY),
    (
        TGI,
        "max-best-of max-stop-sequences max-top-n-tokens max-client-batch-size",
        API_BOUNDS,
    ),
    (TGI, "shard-uds-path", ONE_DEVICE),
    (TGI, "weights-cache-override", "use --download-dir"),
    (TGI, "graceful-termination-timeout", "use --drain-timeout"),
    (TGI, "rope-factor rope-scaling", ROPE),
    (
        TGI,
        "prometheus-port",
        "metrics are at /metrics, on the port of the API; leave the flag out",
    ),
    (TGI, "ngrok ngrok-authtoken ngrok-edge", PROXY),
    (TGI, "usage-stats", SEND_NOTHING),
    (TGI, "disable-grammar-support", GRAMMARS),
    (TGI, "disable-custom-kernels", CHOSEN),
    (
        TGI,
        "watermark-gamma watermark-delta",
        "texts are not marked; leave the flag out",
    ),
    (
        TGI,
        "otlp-service-name",
        "traces are told apart by their attributes; leave the flag out",
    ),
    (
        LIGHTLLM,
        "max-req-input-len",
        "use --max-model-len: prompt and output together",
    ),
    (
        LIGHTLLM,
        "nccl-host zmq-mode multinode-httpmanager-port multinode-router-gloo-port enable-custom-allreduce \
         enable-custom-allgather enable-tpsp-mix-mode",
        ONE_DEVICE,
    ),
    (
        LIGHTLLM,
        "run-mode pd-master-ip pd-master-port pd-decode-rpyc-port",
        STAYS,
    ),
    (LIGHTLLM, "eos-id load-way", AS_FOUND),
    (
        LIGHTLLM,
        "use-dynamic-prompt-cache disable-chunked-prefill",
        ALWAYS,
    ),
    (LIGHTLLM, "output-constraint-mode", GRAMMARS),
    (
        LIGHTLLM,
        "enable-multimodal cache-capacity cache-reserved-ratio visual-gpu-ids visual-tp visual-dp \
         visual-nccl-ports visual-infer-batch-size vit-quant-type vit-quant-cfg",
        NO_IMAGES,
    ),
    (LIGHTLLM, "quant-cfg", WEIGHTS_SAY),
    (
        LIGHTLLM,
        "health-monitor",
        "use --watchdog-timeout, and a supervisor that starts the server again",
    ),
    (
        LIGHTLLM,
        "metric-gateway job-name grouping-key push-interval enable-monitor-auth log-stats-interval",
        METERS,
    ),
    (LIGHTLLM, "router-max-wait-tokens", FOUND),
    (LIGHTLLM, "return-all-prompt-logprobs", CLIENTS_ASK),
    (
        LIGHTLLM,
        "use-tgi-api",
        "the API is that of OpenAI and Anthropic; leave the flag out",
    ),
    (
        LIGHTLLM,
        "enable-flashinfer-prefill enable-flashinfer-decode",
        CHOSEN,
    ),
];
