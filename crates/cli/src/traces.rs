//! OpenTelemetry traces: a span for every request that generated something, by the GenAI semantic conventions.

use std::pin::Pin;
use std::time::Duration;

use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{Span, SpanBuilder, SpanKind, Status, Tracer, TracerProvider};
use opentelemetry::{Array, Context, KeyValue, StringValue, Value};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use plimsoll_server::{Generation, RequestRecord, RequestSink};
use tokio::runtime::Handle;

use crate::client::check_http_url;
use crate::error::Error;

/// Sends spans in batches from a thread of the SDK's own; what a full queue does not take is dropped.
#[derive(Debug)]
pub(crate) struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

impl Traces {
    /// Spans go to `endpoint` by OTLP over HTTP, as protobuf.
    ///
    /// # Errors
    /// If `endpoint` is not an HTTP URL.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub(crate) fn to(endpoint: &str) -> Result<Self, Error> {
        let wrong = |message: String| Error::configuration(FLAG, message);
        check_http_url(FLAG, endpoint, "http://localhost:4318/v1/traces")?;
        let client = reqwest::Client::builder().timeout(TIMEOUT).build();
        let client = OnRuntime {
            client: client.map_err(|error| wrong(error.to_string()))?,
            runtime: Handle::current(),
        };
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_endpoint(endpoint)
            .with_timeout(TIMEOUT)
            .build()
            .map_err(|error| wrong(error.to_string()))?;
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(Resource::builder().with_service_name("plimsoll").build())
            .build();
        Ok(Self {
            tracer: provider.tracer("plimsoll"),
            provider,
        })
    }

    /// Sends what is left. Blocks for [`TIMEOUT`] at most.
    pub(crate) fn finish(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(TIMEOUT) {
            tracing::warn!("the last traces are lost: {error}");
        }
    }
}

/// Names where spans go.
const FLAG: &str = "--otlp-traces-endpoint";

/// How long one export may take.
const TIMEOUT: Duration = Duration::from_secs(5);

impl RequestSink for Traces {
    fn ended(&self, record: &RequestRecord) {
        let Some(generation) = &record.generation else {
            return;
        };
        // W3C Trace Context: the span belongs to the caller's trace, if there is one.
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers(record));
        let operation = operation(&record.path);
        let end = record.began + record.duration;
        let builder = SpanBuilder::from_name(format!("{operation} {}", generation.model))
            .with_kind(SpanKind::Server)
            .with_start_time(record.began)
            .with_attributes(attributes(record, generation, operation));
        let mut span = self.tracer.build_with_context(builder, &parent);
        if let Some(error) = record.error {
            span.set_attribute(KeyValue::new("error.type", error));
            span.set_status(Status::error(error));
        }
        span.end_with_timestamp(end);
    }
}

/// The value of `gen_ai.operation.name`.
fn operation(path: &str) -> &'static str {
    match path {
        "/v1/completions" => "text_completion",
        "/v1/embeddings" => "embeddings",
        _ => "chat",
    }
}

/// Names of the semantic conventions, and vLLM's for the latencies.
fn attributes(record: &RequestRecord, generation: &Generation, operation: &'static str) -> Vec<KeyValue> {
    let count = |tokens: usize| Value::I64(i64::try_from(tokens).unwrap_or(i64::MAX));
    let seconds = |time: Duration| Value::F64(time.as_secs_f64());
    let reasons = generation.finish_reasons.iter();
    let reasons = reasons.map(|&reason| StringValue::from(reason)).collect();
    let mut attributes = vec![
        KeyValue::new("gen_ai.operation.name", operation),
        KeyValue::new("gen_ai.provider.name", "plimsoll"),
        KeyValue::new("gen_ai.request.model", generation.model.clone()),
        KeyValue::new("gen_ai.response.model", generation.model.clone()),
        KeyValue::new("gen_ai.request.id", record.request_id.clone()),
        KeyValue::new("gen_ai.usage.input_tokens", count(generation.prompt_tokens)),
        KeyValue::new("gen_ai.usage.output_tokens", count(generation.output_tokens)),
        KeyValue::new(
            "gen_ai.usage.cache_read.input_tokens",
            count(generation.cached_tokens),
        ),
        KeyValue::new(
            "gen_ai.response.finish_reasons",
            Value::Array(Array::String(reasons)),
        ),
        KeyValue::new("gen_ai.latency.e2e", seconds(record.duration)),
        KeyValue::new("http.request.method", record.method.as_str().to_owned()),
        KeyValue::new("url.path", record.path.clone()),
        KeyValue::new("http.response.status_code", i64::from(record.status.as_u16())),
    ];
    let optional = [
        ("gen_ai.request.max_tokens", generation.max_tokens.map(count)),
        (
            "gen_ai.request.temperature",
            generation.temperature.map(Value::F64),
        ),
        ("gen_ai.request.top_p", generation.top_p.map(Value::F64)),
        ("gen_ai.latency.time_in_queue", generation.queued.map(seconds)),
        (
            "gen_ai.latency.time_to_first_token",
            generation.first_token.map(seconds),
        ),
    ];
    let optional = optional.into_iter();
    attributes.extend(optional.filter_map(|(name, value)| Some(KeyValue::new(name, value?))));
    attributes
}

/// The caller's trace.
struct Headers<'a>(&'a RequestRecord);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        match key {
            "traceparent" => self.0.traceparent.as_deref(),
            "tracestate" => self.0.tracestate.as_deref(),
            _ => None,
        }
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent", "tracestate"]
    }
}

/// The SDK exports from a thread that knows no runtime, which the client needs.
#[derive(Debug)]
struct OnRuntime {
    client: reqwest::Client,
    runtime: Handle,
}

type Sent<'a> = Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'a>>;

impl HttpClient for OnRuntime {
    fn send_bytes<'a, 'b>(&'a self, request: Request<Bytes>) -> Sent<'b>
    where
        'a: 'b,
        Self: 'b,
    {
        let client = self.client.clone();
        let sent = self
            .runtime
            .spawn(async move { client.send_bytes(request).await });
        Box::pin(async move {
            let response = sent.await?;
            match &response {
                Ok(response) if response.status().is_success() => {}
                Ok(response) => tracing::warn!(status = %response.status(), "the collector refused traces"),
                Err(error) => tracing::warn!(%error, "cannot send traces"),
            }
            response
        })
    }
}
