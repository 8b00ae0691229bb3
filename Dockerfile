# syntax=docker/dockerfile:1
# docker build -t plimsoll . && docker run --rm -p 8000:8000 -v plimsoll-hub:/hub plimsoll HuggingFaceTB/SmolLM2-135M-Instruct

FROM rust:1.95-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ make git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked -p plimsoll-cli \
    && install -D target/release/plimsoll /out/plimsoll

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates curl \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 plimsoll \
    && install --directory --owner plimsoll /hub
COPY --from=build /out/plimsoll /usr/local/bin/plimsoll
USER plimsoll
# The Hub's cache outlives the container.
ENV HF_HOME=/hub
VOLUME /hub
EXPOSE 8000
# Loading and profiling a model takes a while; nothing listens before it is proved.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD ["curl", "--fail", "--silent", "http://127.0.0.1:8000/ready"]
ENTRYPOINT ["plimsoll", "serve", "--host", "0.0.0.0", "--port", "8000"]
