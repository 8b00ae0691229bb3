# Everything a newcomer needs: `make serve`, `make test`, `make bench`.

PORT ?= 8000
ARGS ?=
VENV := .venv
PYTHON := $(VENV)/bin/python

.PHONY: help
help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

.PHONY: serve
serve:  ## Fetch the default model, build, serve it on PORT (8000); more flags in ARGS
	@model=$$(scripts/fetch-default-model) && \
	cargo build --release --locked -p plimsoll-cli && \
	exec target/release/plimsoll serve "$$model" --served-model-name SmolLM2-135M-Instruct \
		--generation-config config/SmolLM2-135M-Instruct --port $(PORT) $(ARGS)

.PHONY: cuda
cuda: cuda-compiler  ## target/release/plimsoll with CUDA kernels; CUDA_ARCHS=90a builds for one GPU architecture only
	cargo build --release --locked -p plimsoll-cli --features cuda

.PHONY: bench
bench:  ## Latency and throughput of the default model, in release
	@model=$$(scripts/fetch-default-model) && \
	cargo build --release --locked -p plimsoll-cli && \
	target/release/plimsoll bench latency "$$model" --batch-size 1 $(ARGS) && \
	target/release/plimsoll bench throughput "$$model" $(ARGS)

# Servers of the HTTP tests wait a quarter of the time, which is enough for the lints.
.PHONY: test
test: check-format test-rust  ## Everything CI checks except the CUDA build
	$(MAKE) --jobs=2 --output-sync=line lint test-http

.PHONY: check-format
check-format:
	cargo fmt --all --check

.PHONY: lint
lint: check-format  ## Format, clippy, docs
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo clippy --locked --workspace --test gpu -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --document-private-items

.PHONY: test-rust
test-rust: $(VENV)/ready  ## Unit, property, simulation, architecture and licence tests
	scripts/fetch-test-data
	scripts/fetch-tool-calls
	scripts/fetch-default-model >/dev/null
	$(PYTHON) scripts/render-templates
	cargo test --locked --workspace

.PHONY: test-http
test-http: $(VENV)/ready build  ## Black-box tests over HTTP, with the official OpenAI client
	scripts/fetch-default-model >/dev/null
	scripts/fetch-test-data
	$(PYTHON) -m pytest tests/http --numprocesses 4 --dist loadfile $(PYTEST_ARGS)
	$(PYTHON) tests/peers --fast

.PHONY: build
build:
	cargo build --locked -p plimsoll-cli

.PHONY: screenshot
screenshot: $(VENV)/ready  ## docs/chat.png, the picture in README
	scripts/fetch-default-model >/dev/null
	cargo build --release --locked -p plimsoll-cli
	$(PYTHON) scripts/screenshot

.PHONY: soak
soak: $(VENV)/ready build  ## Mixed load with client failures and injected faults for MINUTES (60); checks for leaks, lost requests and slowdown
	exec $(PYTHON) tests/soak --minutes $${MINUTES:-60} $(ARGS)

.PHONY: fuzz
fuzz:  ## Every fuzz target for a minute each, with libFuzzer
	@for target in $$(scripts/fuzz); do echo "== $$target"; scripts/fuzz $$target $${SECONDS_EACH:-60} || exit 1; done

.PHONY: bench-front
bench-front:  ## Overhead of the HTTP server, in release, into tests/bench/cpu/front.json
	cargo build --release --locked -p plimsoll-cli
	scripts/bench-front --output-json tests/bench/cpu/front.json $(ARGS)

.PHONY: test-peers
test-peers: $(VENV)/ready build  ## vLLM's own tests of its API; ARGS=--rewrite writes anew which of them do not pass
	scripts/fetch-default-model >/dev/null
	scripts/fetch-test-data
	$(PYTHON) tests/peers $(ARGS)

.PHONY: test-clients
test-clients: .cache/clients/ready build  ## LangChain, LiteLLM, the official Node.js client, Dynamo's router and indexer, which need their own packages
	cargo build --locked --manifest-path tests/clients/kv-router/Cargo.toml --target-dir .cache/clients/target
	scripts/fetch-default-model >/dev/null
	.cache/clients/venv/bin/python -m pytest tests/clients $(PYTEST_ARGS)

.PHONY: test-agents
test-agents: $(VENV)/ready tests/agents/node_modules/ready build  ## Claude Code and Codex (600 MB) against the simulated model
	$(PYTHON) -m pytest tests/agents $(PYTEST_ARGS)

.PHONY: release
release:  ## Wheels, tarballs, bills of materials and checksums for CPUs and NVIDIA GPUs, into target/dist
	scripts/release cpu cuda

.PHONY: container
container:  ## Build the image for DEVICE (cuda or cpu), test it, report its size; needs docker or podman
	scripts/container $${DEVICE:-cuda}

.PHONY: test-container
test-container: build  ## The image around the debug binary, by podman, which root installs on Debian; reaches no registry of images
	@scripts/install-podman
	base=$$(scripts/base-image) && CONTAINERS_CONF=$(CURDIR)/.ci/containers.conf BUILDAH_ISOLATION=chroot \
	BUILD_FLAGS=--build-arg=RUN_IMAGE=$$base scripts/container cpu --engine podman --binary target/debug/plimsoll

.PHONY: test-cuda
test-cuda: $(VENV)/ready cuda-compiler  ## The binary with CUDA kernels, on a machine with or without a GPU: builds, serves on the CPU
	scripts/fetch-default-model >/dev/null
	CUDA_ARCHS=$${CUDA_ARCHS:-90a} cargo build --locked -p plimsoll-cli --features cuda
	target/debug/plimsoll --version | grep CUDA
	$(PYTHON) -m pytest tests/http/test_device.py $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: cuda-compiler  ## The tests that need an NVIDIA GPU
	cargo test --locked --features plimsoll-cli/cuda -p plimsoll-device -p plimsoll-kernels -p plimsoll-model \
		-p plimsoll-cli --lib --bins --test '*' -- --ignored --test-threads=1

.PHONY: cuda-compiler
cuda-compiler:
	@scripts/install-cuda >/dev/null

$(VENV)/ready: tests/requirements.txt
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --disable-pip-version-check --quiet --requirement tests/requirements.txt
	touch $@

tests/agents/node_modules/ready: tests/agents/package-lock.json
	npm ci --prefix tests/agents --silent --no-audit --no-fund --ignore-scripts
	node tests/agents/node_modules/@anthropic-ai/claude-code/install.cjs
	touch $@

.cache/clients/ready: tests/clients/requirements.txt tests/clients/node/package-lock.json
	python3 -m venv .cache/clients/venv
	.cache/clients/venv/bin/python -m pip install --disable-pip-version-check --quiet --no-compile --no-deps --requirement tests/clients/requirements.txt
	npm ci --prefix tests/clients/node --silent --no-audit --no-fund
	touch $@
