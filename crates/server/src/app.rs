//! The routes and their middleware.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::MatchedPath;
use axum::http::{HeaderName, Method, Uri, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use axum::{Extension, Router};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any as AnyOf, CorsLayer};
use utoipa::openapi::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::batches::Endpoints;
use crate::error::{ApiError, SHOULD_RETRY};
use crate::observe::{IGNORED_FIELDS, REQUEST_ID, observe};
use crate::options::ServerOptions;
use crate::quota::{REQUEST_HEADERS, TOKEN_HEADERS};
use crate::state::AppState;
use crate::{
    admin, anthropic, batches, chat, completions, drain, embeddings, openapi, pages, prefix_cache, responses,
    scoring, sleep, text, tokenizer_info,
};

/// The whole API.
pub fn router(state: AppState) -> Router {
    let options = state.options().clone();
    let layers = tower::ServiceBuilder::new()
        .layer(from_fn(anthropic::reword))
        // Outside of `observe`, so that browsers can read its errors too.
        .option_layer(cors(&options))
        .layer(from_fn_with_state(state.clone(), observe))
        .layer(CatchPanicLayer::custom(panicked));
    let (router, api) = routes(&options).split_for_parts();
    let methods = Methods::of(&api);
    router
        .layer(Extension(endpoints(&state)))
        .layer(Extension(openapi::Document::new(api, &options.root_path)))
        .merge(turned_off(&options))
        .fallback(|uri: Uri| async move { ApiError::PathNotFound(uri.path().to_owned()) })
        .method_not_allowed_fallback(move |method: Method, path: MatchedPath| async move {
            methods.refusal(&method, path.as_str())
        })
        .layer(layers)
        .with_state(state)
}

/// The methods that each path knows.
#[derive(Clone, Debug)]
struct Methods(Arc<HashMap<String, Vec<&'static str>>>);

impl Methods {
    fn of(api: &OpenApi) -> Self {
        let paths = api.paths.paths.iter().map(|(path, item)| {
            let methods = [
                ("GET", item.get.is_some()),
                // axum answers it wherever it answers GET.
                ("HEAD", item.get.is_some()),
                ("POST", item.post.is_some()),
                ("PUT", item.put.is_some()),
                ("PATCH", item.patch.is_some()),
                ("DELETE", item.delete.is_some()),
            ];
            let methods = methods.into_iter().filter(|(_, known)| *known);
            (path.clone(), methods.map(|(method, _)| method).collect())
        });
        Self(Arc::new(paths.collect()))
    }

    /// The error of a method that `path` does not know.
    fn refusal(&self, method: &Method, path: &str) -> ApiError {
        // As the documentation shows it.
        let shown = path.replace("{*", "{");
        let allowed = match self.0.get(path).map(Vec::as_slice) {
            Some([one]) => format!("{shown} only takes {one}"),
            Some([others @ .., last]) => format!("{shown} only takes {} and {last}", others.join(", ")),
            _ => "the header `allow` names the methods that are".to_owned(),
        };
        ApiError::MethodNotAllowed {
            method: method.to_string(),
            allowed,
        }
    }
}

/// What batches may use.
pub(crate) fn endpoints(state: &AppState) -> Endpoints {
    let (router, _) = generating().split_for_parts();
    let router = router.layer(CatchPanicLayer::custom(panicked));
    Endpoints(router.with_state(state.clone()))
}

/// Routes that use the model, and may be used by batches.
fn generating() -> OpenApiRouter<AppState> {
    OpenApiRouter::with_openapi(openapi::about())
        .routes(routes!(chat::handle))
        .routes(routes!(completions::handle))
        .routes(routes!(embeddings::handle))
        .merge(scoring::routes())
        .merge(responses::routes())
}

/// All routes, each with its OpenAPI description.
fn routes(options: &ServerOptions) -> OpenApiRouter<AppState> {
    let routes = generating()
        .merge(anthropic::routes())
        .routes(routes!(admin::models))
        .routes(routes!(admin::model))
        .routes(routes!(text::tokenize))
        .routes(routes!(text::detokenize))
        .routes(routes!(admin::health))
        .routes(routes!(admin::ready))
        .routes(routes!(admin::ping))
        .routes(routes!(admin::ping_post))
        .routes(routes!(admin::metrics))
        .routes(routes!(admin::memory))
        .routes(routes!(admin::version))
        .routes(routes!(openapi::openapi));
    let flagged = flagged(options).map(|(enabled, routes, _)| (enabled, routes));
    flagged
        .into_iter()
        .chain([(options.pages, pages::routes as Routes)])
        .filter(|(enabled, _)| *enabled)
        .fold(routes, |routes, (_, further)| routes.merge(further()))
}

/// Makes routes.
type Routes = fn() -> OpenApiRouter<AppState>;

/// The routes of each flag, and whether they are there.
fn flagged(options: &ServerOptions) -> [(bool, Routes, &'static str); 6] {
    [
        (
            options.files.is_some(),
            batches::routes,
            "--file-store-max-count above 0",
        ),
        (options.enable_sleep_mode, sleep::routes, "--enable-sleep-mode"),
        (options.enable_admin_api, drain::routes, "--enable-admin-api"),
        (
            options.enable_admin_api,
            prefix_cache::routes,
            "--enable-admin-api",
        ),
        (
            options.tokenizer_info,
            tokenizer_info::routes,
            "--enable-tokenizer-info-endpoint",
        ),
        (
            options.load_tracking,
            admin::load_routes,
            "--enable-server-load-tracking",
        ),
    ]
}

/// Routes of what is turned off: they answer with the flag that turns it on.
fn turned_off(options: &ServerOptions) -> Router<AppState> {
    let off = flagged(options).into_iter().filter(|(enabled, ..)| !enabled);
    let paths = off.flat_map(|(_, routes, flag)| {
        let paths = routes().get_openapi().paths.paths.clone();
        paths.into_keys().map(move |path| (path, flag))
    });
    paths.fold(Router::new(), |router, (path, flag)| {
        let refuse = move |uri: Uri| async move {
            let path = uri.path().to_owned();
            ApiError::TurnedOff { path, flag }
        };
        router.route(&path, any(refuse))
    })
}

pub(crate) fn cors(options: &ServerOptions) -> Option<CorsLayer> {
    let origins = &options.allowed_origins;
    let allow = match origins.as_slice() {
        [] => return None,
        list if list.iter().any(|origin| origin == "*") => AllowOrigin::any(),
        list => AllowOrigin::list(list.iter().cloned()),
    };
    Some(
        CorsLayer::new()
            .allow_origin(allow)
            .allow_methods(AnyOf)
            // `*` does not include Authorization.
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers(exposed()),
    )
}

/// Response headers that scripts may read.
fn exposed() -> Vec<HeaderName> {
    [
        REQUEST_ID,
        anthropic::REQUEST_ID,
        IGNORED_FIELDS,
        header::RETRY_AFTER,
        SHOULD_RETRY,
    ]
    .into_iter()
    .chain(REQUEST_HEADERS)
    .chain(TOKEN_HEADERS)
    .collect()
}

fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    tracing::error!(panic = text.unwrap_or("no message"), "a handler panicked");
    ApiError::Internal("a handler panicked; see the server's log".into()).into_response()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::file_store::{FileLimits, FileStore};

    /// The paths of a router, as its `Debug` shows them.
    fn paths(router: &Router<AppState>) -> BTreeSet<String> {
        let debug = format!("{router:?}");
        let quoted = debug
            .split("RouteId(")
            .filter_map(|part| part.split_once("): \"/"));
        quoted
            .map(|(_, rest)| format!("/{}", rest.split('"').next().unwrap()))
            // axum's own, for what no route takes.
            .filter(|path| !path.contains("__private__axum"))
            .collect()
    }

    #[test]
    fn every_route_is_documented() {
        let options = ServerOptions {
            enable_sleep_mode: true,
            enable_admin_api: true,
            tokenizer_info: true,
            files: Some(Arc::new(FileStore::open(None, FileLimits::default()).unwrap())),
            load_tracking: true,
            ..Default::default()
        };
        let (router, api) = routes(&options).split_for_parts();
        let routed = paths(&router);
        let described: BTreeSet<String> = api.paths.paths.keys().cloned().collect();
        assert!(routed.contains("/v1/chat/completions"), "{routed:?}");
        assert_eq!(routed, described);
        let mut ids = BTreeSet::new();
        for (path, item) in &api.paths.paths {
            for operation in [&item.get, &item.post, &item.delete].into_iter().flatten() {
                assert!(operation.summary.is_some(), "{path} has no summary");
                assert!(
                    ids.insert(&operation.operation_id),
                    "{path}: operation_id is taken"
                );
                assert!(
                    !operation.responses.responses.is_empty(),
                    "{path} has no responses"
                );
            }
        }
    }
}
