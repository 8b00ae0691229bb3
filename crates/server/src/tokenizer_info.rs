//! `GET /tokenizer_info`, as in vLLM.

use axum::Json;
use axum::extract::State;
use serde_json::json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::state::AppState;
use crate::wire::tokenize::TokenizerInfo;

/// The route of `--enable-tokenizer-info-endpoint`.
pub(crate) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::default().routes(routes!(info))
}

/// Tokenizer
///
/// What the model's tokenizer_config.json says, and the chat template in use.
#[utoipa::path(
    get, path = "/tokenizer_info", tag = "Tokens", operation_id = "tokenizerInfo",
    responses((status = 200, description = "The configuration.", body = TokenizerInfo))
)]
async fn info(State(state): State<AppState>) -> Json<TokenizerInfo> {
    let model = state.model();
    let mut config = model.tokenizer_config.clone();
    config
        .entry("tokenizer_class")
        .or_insert_with(|| json!("PreTrainedTokenizerFast"));
    match &model.template {
        Some(template) => config.insert("chat_template".to_owned(), json!(template.source())),
        None => config.remove("chat_template"),
    };
    Json(TokenizerInfo { config })
}
