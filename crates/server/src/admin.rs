//! What the server says about itself.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use plimsoll_core::Meters;
use plimsoll_engine::{Health, OutOfMemory, Phase};
use serde_json::{Map, Value, json};

use crate::error::{ApiError, whole_seconds};
use crate::generate::blocking;
use crate::state::AppState;

/// 200 while the engine lives, drains included: what a liveness probe asks.
pub(crate) async fn health(State(state): State<AppState>) -> Response {
    let health = state.engine().health();
    let alive = health.phase != Phase::Dead;
    report(alive, if alive { "ok" } else { "dead" }, &health)
}

/// 200 where requests are accepted and move: what a readiness probe asks.
pub(crate) async fn ready(State(state): State<AppState>) -> Response {
    let health = state.engine().health();
    let status = match health.phase {
        Phase::Running if health.is_moving(state.options().ready_patience) => "ready",
        Phase::Running => "stalled",
        Phase::Rebuilding => "rebuilding",
        Phase::FallingAsleep | Phase::Asleep => "sleeping",
        Phase::Draining => "draining",
        Phase::Stopped => "stopped",
        Phase::Dead => "dead",
    };
    report(status == "ready", status, &health)
}

fn report(good: bool, status: &str, health: &Health) -> Response {
    let seconds = |age: Option<std::time::Duration>| age.map(|age| age.as_secs_f64());
    let body = json!({
        "status": status,
        "last_step_age_seconds": seconds(health.last_step_age),
        "step_in_progress_seconds": seconds(health.step_in_progress),
        "stalled_seconds": seconds(health.stalled_for),
        "failures_in_a_row": health.failures_in_a_row,
        "last_error": health.last_error,
        "reason": health.outage,
    });
    let code = if good {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let mut response = (code, Json(body)).into_response();
    if !good && health.phase == Phase::Rebuilding {
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, whole_seconds(health.retry_after));
    }
    response
}

/// Off the server's threads, as [`memory`]: a driver that is busy must not hold up the answers to others (U20).
pub(crate) async fn metrics(State(state): State<AppState>) -> Result<Response, ApiError> {
    let page = blocking(move || {
        let engine = state.engine();
        let (stats, health) = (engine.stats(), engine.health());
        Ok(state
            .metrics()
            .render(&stats, &health, engine.kv(), state.memory()))
    })
    .await?;
    let header = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    Ok((header, page).into_response())
}

pub(crate) async fn memory(State(state): State<AppState>) -> Result<Json<Value>, ApiError> {
    blocking(move || Ok(Json(memory_now(&state)))).await
}

/// Asks the device.
fn memory_now(state: &AppState) -> Value {
    let memory = state.memory();
    let stats = state.engine().stats();
    json!({
        "profile": memory.report(),
        "now": live(&memory.meters(), memory.proved_peak()),
        "device_allocs_after_ready": memory.allocations_after_ready(),
        "high_water_above_proof": stats.high_water_above_proof,
        "rebuilds": { "oom": stats.rebuilds_oom, "wake": stats.rebuilds_wake },
        "last_oom": stats.last_oom.map(|outage| last_oom(&outage)),
    })
}

/// Which step ran out of memory, and who had it.
fn last_oom(outage: &OutOfMemory) -> Value {
    let OutOfMemory {
        shape,
        requested,
        component,
        meters,
        peers_at_ready,
    } = outage;
    json!({
        "step": {
            "rows": shape.rows,
            "tokens": shape.tokens,
            "longest_context": shape.longest_context,
            "sampling": shape.sampling,
        },
        "requested": requested,
        "component": component.name(),
        "total": meters.total,
        "free": meters.free,
        "reserved": meters.reserved,
        "used": meters.used,
        "peers": meters.peers(),
        "peers_at_ready": peers_at_ready,
        "peers_delta": outage.peers_delta() as i64,
    })
}

fn live(meters: &Meters, proved_peak: u64) -> Value {
    let components: Map<String, Value> = meters
        .by_component
        .iter()
        .map(|(component, bytes)| (component.name().into(), json!(bytes)))
        .collect();
    json!({
        "total": meters.total,
        "free": meters.free,
        "reserved": meters.reserved,
        "used": meters.used,
        "reserved_high": meters.reserved_high,
        "used_high": meters.used_high,
        "proved_peak": proved_peak,
        "fragmentation": meters.fragmentation(),
        "headroom": meters.headroom(),
        "peers": meters.peers(),
        "components": components,
    })
}

pub(crate) async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

pub(crate) async fn models(State(state): State<AppState>) -> Json<Value> {
    let model = state.model();
    let names = std::iter::once(&model.id).chain(&model.aliases);
    let data: Vec<Value> = names.map(|name| card(&state, name)).collect();
    Json(json!({ "object": "list", "data": data }))
}

/// The id may hold slashes, as those of the Hub do.
pub(crate) async fn model(
    State(state): State<AppState>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    state.check_model(Some(&id))?;
    Ok(Json(card(&state, &id)))
}

fn card(state: &AppState, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": state.started(),
        "owned_by": "plimsoll",
        "root": state.model().id,
        "parent": null,
        "max_model_len": state.engine().limits().max_model_len,
    })
}
