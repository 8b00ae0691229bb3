# syntax=docker/dockerfile:1
#
# NVIDIA GPUs (the NVIDIA Container Toolkit gives them to containers; without --gpus this image serves on the CPU):
#   docker build -t plimsoll . && docker run --rm --gpus all -p 8000:8000 -v plimsoll-hub:/hub plimsoll Qwen/Qwen3-8B
# For one kind of GPU, several times as fast to build: --build-arg CUDA_ARCHS=90a (kernels/README.md).
#
# CPUs alone, a much smaller image:
#   docker build -t plimsoll:cpu --build-arg FEATURES= --build-arg BUILD_IMAGE=ubuntu:24.04 \
#       --build-arg RUN_IMAGE=ubuntu:24.04 .
#
# `scripts/container cpu` (or cuda) builds one of them, reports its size, keeps its bill of materials, runs it and asks it.

ARG BUILD_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
# Without cuBLAS, which nvidia/cuda has from the `runtime` images on, beside much that is not used here: its two libraries
# are copied from the build image instead.
ARG RUN_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04

FROM rust:1.95.0-slim-bookworm AS rust

FROM ${BUILD_IMAGE} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ make python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=rust /usr/local/rustup /usr/local/rustup
COPY --from=rust /usr/local/cargo /usr/local/cargo
# The toolchain is named so that rustup does not fetch clippy and rustfmt, which rust-toolchain.toml asks for.
ENV RUSTUP_HOME=/usr/local/rustup CARGO_HOME=/usr/local/cargo RUSTUP_TOOLCHAIN=1.95.0 PATH=/usr/local/cargo/bin:${PATH}
WORKDIR /src
COPY . .
ARG FEATURES=cuda
# dev: quick to build, slow to run.
ARG PROFILE=release
ARG CUDA_ARCHS=
# The context has no repository.
ARG REVISION=unknown
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    if [ "$(uname -m)" = aarch64 ]; then \
        # The allocator takes this machine's pages for everybody's; Arm servers have some of 4, 16 and 64 KiB.
        export JEMALLOC_SYS_WITH_LG_PAGE=16; \
    fi \
    && export BUILD_COMMIT="${REVISION}" \
    && cargo build --profile "${PROFILE}" --locked -p plimsoll-cli --features "${FEATURES}" \
    && install -D "target/$([ "${PROFILE}" = dev ] && echo debug || echo "${PROFILE}")/plimsoll" /out/bin/plimsoll \
    && install --directory /out/share/sbom \
    && scripts/sbom /out/share/sbom/plimsoll.cdx.json "${FEATURES}"
RUN mkdir --parents /out/lib \
    && if [ -n "${FEATURES}" ]; then \
        cp --dereference /usr/local/cuda/lib64/libcublas.so.13 /usr/local/cuda/lib64/libcublasLt.so.13 /out/lib/; \
    fi

FROM ${RUN_IMAGE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates curl \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 plimsoll \
    && install --directory --owner plimsoll /hub
COPY --from=build /out/ /usr/local/
RUN ldconfig
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="plimsoll" \
      org.opencontainers.image.description="An LLM inference server that measures how much KV cache fits" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 10001
# What the Hub sent and what earlier starts measured outlive the container. It writes there and to /tmp alone.
ENV HF_HOME=/hub PLIMSOLL_PROFILE_CACHE_DIR=/hub/plimsoll/profiles
VOLUME /hub
EXPOSE 8000
# Loading and profiling a model may take as long as the chart allows (startupMinutes); until it is proved /ready is a 503 that
# says how far it is.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60m CMD ["curl", "--fail", "--silent", "http://127.0.0.1:8000/ready"]
ENTRYPOINT ["plimsoll", "serve", "--host", "0.0.0.0", "--port", "8000"]
