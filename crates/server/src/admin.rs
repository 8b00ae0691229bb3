//! Endpoints about the server: probes, metrics, memory, models.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use plimsoll_core::Meters;
use plimsoll_engine::{Health, OutOfMemory, Phase};
use serde_json::json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::blocking::blocking;
use crate::error::{ApiError, whole_seconds};
use crate::memory::{kv_groups, states};
use crate::state::AppState;
use crate::status::Status;
use crate::wire::about::{
    HealthReport, ImagesNow, KvNow, LargestImage, LastOom, LoadReport, MemoryNow, MemoryReport, ModelCard,
    ModelList, NotReady, OomStep, RankNow, Rebuilds, Version,
};
use crate::wire::error::ErrorBody;

/// Liveness
///
/// 200 while the engine is alive, also during start and drain: for liveness probes.
#[utoipa::path(
    get, path = "/health", tag = "Operation",
    responses(
        (status = 200, description = "The engine is alive.", body = HealthReport),
        (status = 503, description = "The engine is dead.", body = HealthReport),
    )
)]
pub(crate) async fn health(State(state): State<AppState>) -> Response {
    let health = state.engine().health();
    let alive = health.phase != Phase::Dead;
    report(alive, if alive { "ok" } else { "dead" }, &health)
}

/// Ping
///
/// As `/health`, without a body: what SageMaker asks.
#[utoipa::path(
    get, path = "/ping", tag = "Operation", operation_id = "ping",
    responses(
        (status = 200, description = "The engine is alive."),
        (status = 503, description = "The engine is dead."),
    )
)]
pub(crate) async fn ping(State(state): State<AppState>) -> StatusCode {
    match state.engine().health().phase {
        Phase::Dead => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::OK,
    }
}

/// Ping
///
/// The same.
#[utoipa::path(
    post, path = "/ping", tag = "Operation", operation_id = "pingPost",
    responses(
        (status = 200, description = "The engine is alive."),
        (status = 503, description = "The engine is dead."),
    )
)]
pub(crate) async fn ping_post(state: State<AppState>) -> StatusCode {
    ping(state).await
}

/// The route of `--enable-server-load-tracking`.
pub(crate) fn load_routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::default().routes(routes!(load))
}

/// Load
///
/// Requests for the model that have arrived and whose response has not ended.
#[utoipa::path(
    get, path = "/load", tag = "Operation", operation_id = "load",
    responses((status = 200, description = "How many there are.", body = LoadReport))
)]
async fn load(State(state): State<AppState>) -> Json<LoadReport> {
    Json(LoadReport {
        server_load: state.load().now(),
    })
}

/// Readiness
///
/// 200 while requests are accepted and make progress: for readiness probes.
#[utoipa::path(
    get, path = "/ready", tag = "Operation",
    responses(
        (status = 200, description = "Requests are accepted and make progress.", body = HealthReport),
        (status = 503, description = "Not ready; `status` says why.", body = NotReady),
    )
)]
pub(crate) async fn ready(State(state): State<AppState>) -> Response {
    let health = state.engine().health();
    let status = state.status(&health);
    report(status == Status::Ready, status.name(), &health)
}

fn report(good: bool, status: &str, health: &Health) -> Response {
    let seconds = |age: Option<std::time::Duration>| age.map(|age| age.as_secs_f64());
    let body = HealthReport {
        status,
        last_step_age_seconds: seconds(health.last_step_age),
        step_in_progress_seconds: seconds(health.step_in_progress),
        stalled_seconds: seconds(health.stalled_for),
        failures_in_a_row: health.failures_in_a_row,
        last_error: health.last_error.as_deref(),
        reason: health.outage.as_deref(),
    };
    let code = match good {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    let mut response = (code, Json(NotReady::Engine(body))).into_response();
    if !good && health.phase == Phase::Rebuilding {
        let after = whole_seconds(health.retry_after);
        response.headers_mut().insert(header::RETRY_AFTER, after);
    }
    response
}

/// Metrics
///
/// Prometheus' text format, under our own names and vLLM's.
#[utoipa::path(
    get, path = "/metrics", tag = "Operation",
    responses((status = 200, description = "All metrics.", body = String, content_type = "text/plain"))
)]
pub(crate) async fn metrics(State(state): State<AppState>) -> Result<Response, ApiError> {
    let meters = state.meters().await;
    let page = move || {
        let metrics = state.metrics();
        Ok(metrics.render(state.engine(), state.model(), state.memory(), &meters))
    };
    Ok(metrics_page(blocking(page).await?))
}

/// A page in Prometheus' format.
pub(crate) fn metrics_page(page: String) -> Response {
    let header = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (header, page).into_response()
}

/// Memory
///
/// The device's memory now, and the report of the profile.
#[utoipa::path(
    get, path = "/memory", tag = "Operation",
    responses((status = 200, description = "All sizes in bytes.", body = MemoryReport))
)]
pub(crate) async fn memory(State(state): State<AppState>) -> Result<Response, ApiError> {
    let meters = state.meters().await;
    blocking(move || Ok(Json(memory_now(&state, &meters)).into_response())).await
}

fn memory_now(state: &AppState, meters: &[Meters]) -> MemoryReport {
    let memory = state.memory();
    let peaks = memory.proved_peaks();
    let ranks = meters.iter().zip(&peaks).enumerate();
    let ranks = ranks.map(|(rank, (meters, &peak))| RankNow {
        rank,
        now: live(meters, peak),
    });
    let first = &meters[0];
    let (stats, kv) = (state.engine().stats(), state.engine().kv());
    MemoryReport {
        profile: memory.report(),
        now: live(first, peaks[0]),
        ranks: if meters.len() > 1 {
            ranks.collect()
        } else {
            Vec::new()
        },
        kv: KvNow {
            pages: stats.scheduler.pages_total,
            pages_used: stats.scheduler.pages_used,
            groups: kv_groups(&kv, &stats.scheduler, first),
            states: states(&kv, &stats.scheduler, first),
        },
        images: images(state),
        device_allocs_after_ready: memory.allocations_after_ready(),
        high_water_above_proof: stats.high_water_above_proof,
        rebuilds: Rebuilds {
            oom: stats.rebuilds_oom,
            wake: stats.rebuilds_wake,
        },
        last_oom: stats.last_oom.map(|outage| last_oom(&outage)),
    }
}

/// The images that requests may have, if they may have any.
fn images(state: &AppState) -> Option<ImagesNow> {
    let max_per_request = state.options().media.max_images;
    let input = state.model().images.as_ref().filter(|_| max_per_request > 0)?;
    let worst = input.processor().worst_image();
    Some(ImagesNow {
        max_per_request,
        largest: LargestImage {
            width: worst.width,
            height: worst.height,
            patches: worst.plan.grid.patches(),
            tokens: worst.plan.rows,
        },
    })
}

fn last_oom(outage: &OutOfMemory) -> LastOom {
    let (shape, meters) = (&outage.shape, &outage.meters);
    LastOom {
        step: OomStep {
            rows: shape.rows,
            tokens: shape.tokens,
            longest_context: shape.longest_context,
            image_patches: shape.image_patches,
            sampling: shape.sampling.iter().copied().collect(),
        },
        requested: outage.requested,
        component: outage.component.name(),
        total: meters.total,
        free: meters.free,
        reserved: meters.reserved,
        used: meters.used,
        peers: meters.peers(),
        peers_at_ready: outage.peers_at_ready,
        peers_delta: outage.peers_delta() as i64,
    }
}

fn live(meters: &Meters, proved_peak: u64) -> MemoryNow {
    let components = meters.by_component.iter();
    let components = components.map(|(component, bytes)| (component.name().into(), json!(bytes)));
    MemoryNow {
        total: meters.total,
        free: meters.free,
        reserved: meters.reserved,
        used: meters.used,
        reserved_high: meters.reserved_high,
        used_high: meters.used_high,
        proved_peak,
        fragmentation: meters.fragmentation(),
        headroom: meters.headroom(),
        peers: meters.peers(),
        components: components.collect(),
    }
}

/// Version
#[utoipa::path(
    get, path = "/version", tag = "Operation",
    responses((status = 200, description = "The server's version.", body = Version))
)]
pub(crate) async fn version() -> Json<Version> {
    Json(Version {
        version: env!("CARGO_PKG_VERSION"),
    })
}

/// List models
///
/// The served model, once under each of its names.
#[utoipa::path(
    get, path = "/v1/models", tag = "Models",
    responses((status = 200, description = "The first name is the one in responses.", body = ModelList))
)]
pub(crate) async fn models(State(state): State<AppState>) -> Response {
    let model = state.model();
    let names = std::iter::once(&model.id).chain(&model.aliases);
    let list = ModelList {
        object: "list",
        data: names.map(|name| card(&state, name)).collect(),
    };
    Json(list).into_response()
}

/// Get a model
///
/// The id may contain slashes, like ids of the Hugging Face Hub.
#[utoipa::path(
    get, path = "/v1/models/{*id}", tag = "Models",
    params(("id" = String, Path, description = "A name of the served model.")),
    responses(
        (status = 200, description = "The served model under this name.", body = ModelCard),
        (status = 404, description = "This server serves no such model.", body = ErrorBody),
    )
)]
pub(crate) async fn model(
    State(state): State<AppState>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    state.check_model(Some(&id))?;
    Ok(Json(card(&state, &id)).into_response())
}

fn card<'a>(state: &'a AppState, name: &'a str) -> ModelCard<'a> {
    ModelCard {
        id: name,
        object: "model",
        created: state.started(),
        owned_by: "plimsoll",
        root: &state.model().id,
        parent: None,
        max_model_len: state.engine().limits().max_model_len,
        input_modalities: match images(state) {
            Some(_) => &["text", "image"],
            None => &["text"],
        },
        quantization: state.model().quantization.as_deref(),
        bits_per_weight: state.model().bits_per_weight,
        num_parameters: state.model().num_parameters,
        num_active_parameters: state.model().num_active_parameters,
    }
}
