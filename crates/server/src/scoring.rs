//! `/score` and `/rerank`: how well texts match, by the vectors of a model that is served for embeddings, or by a cross-encoder.

use axum::extract::State;
use axum::http::Uri;
use axum::{Extension, Json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::body::Body;
use crate::context::Context;
use crate::error::ApiError;
use crate::model::EmbeddingInfo;
use crate::openapi::Errors;
use crate::pairs::Pairs;
use crate::respond::Identity;
use crate::state::AppState;
use crate::vectors::{Cut, Source, Texts, cosine};
use crate::wire::common::OneOrMany;
use crate::wire::completion::Prompt;
use crate::wire::embedding::EmbeddingUsage;
use crate::wire::scoring::{
    Document, DocumentText, Ranked, Ranking, RerankRequest, Score, ScoreFields, ScoreList, ScoreRequest,
    ScoringFields,
};

/// The routes: vLLM has each endpoint under several paths, for clients of Jina and Cohere.
pub(crate) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::default()
        .routes(routes!(rerank))
        .routes(routes!(rerank_v1))
        .routes(routes!(rerank_v2))
        .routes(routes!(score))
        .routes(routes!(score_v1))
}

/// One path of an endpoint.
macro_rules! path {
    ($name:ident, $path:literal, $id:literal, $body:ty, $list:ty, $answer:path, $about:literal, $example:expr) => {
        #[doc = $about]
        ///
        /// Needs a model that is served for embeddings, whose vectors are compared, or a cross-encoder, which reads both texts at once.
        #[utoipa::path(
                    post, path = $path, tag = "Embeddings", operation_id = $id,
                    request_body(content = $body, example = $example),
                    responses((status = 200, description = "How well the texts match.", body = $list), Errors)
                )]
        async fn $name(
            State(state): State<AppState>,
            Extension(context): Extension<Context>,
            uri: Uri,
            Body(request): Body<$body>,
        ) -> Result<Json<$list>, ApiError> {
            let embedding = served(&state, &uri)?;
            $answer(&state, &context, &embedding, request)
                .await
                .map(Json)
        }
    };
}

macro_rules! rerank_path {
    ($name:ident, $path:literal, $id:literal) => {
        path!(
            $name,
            $path,
            $id,
            RerankRequest,
            Ranking,
            rank,
            "Rank texts",
            json!({ "query": "What is a load line?", "documents": ["A mark on a hull", "A kind of bread"], "top_n": 1 })
        );
    };
}

macro_rules! score_path {
    ($name:ident, $path:literal, $id:literal) => {
        path!(
            $name,
            $path,
            $id,
            ScoreRequest,
            ScoreList,
            compare,
            "Compare texts",
            json!({ "text_1": "What is a load line?", "text_2": ["A mark on a hull", "A kind of bread"] })
        );
    };
}

rerank_path!(rerank, "/rerank", "rerank");
rerank_path!(rerank_v1, "/v1/rerank", "rerankV1");
rerank_path!(rerank_v2, "/v2/rerank", "rerankV2");
score_path!(score, "/score", "score");
score_path!(score_v1, "/v1/score", "scoreV1");

/// How the model makes vectors; where it makes none, there is nothing at this path.
fn served(state: &AppState, uri: &Uri) -> Result<EmbeddingInfo, ApiError> {
    let model = state.model();
    model.embedding.clone().ok_or_else(|| ApiError::NoEmbeddings {
        path: uri.path().to_owned(),
        model: model.id.clone(),
    })
}

/// The texts' sides, and how they are truncated.
struct Sides<'a> {
    state: &'a AppState,
    context: &'a Context,
    embedding: &'a EmbeddingInfo,
    common: ScoringFields,
}

/// The score of each text of the second side, and how many tokens all took.
struct Compared {
    scores: Vec<f64>,
    tokens: usize,
}

impl Sides<'_> {
    fn cut(&self) -> Result<Option<Cut>, ApiError> {
        let ScoringFields {
            truncate_prompt_tokens: asked,
            truncation_side: side,
            ..
        } = self.common;
        Cut::new("truncate_prompt_tokens", asked, side, self.most())
    }

    /// Most tokens of a text.
    fn most(&self) -> usize {
        self.state.engine().limits().max_request_tokens()
    }

    /// Compares each text of the second side with the text of the first, or with that at its place; `each` truncates texts of
    /// the second side, in place of what the request says of all.
    async fn compare(
        &self,
        mut first: Source,
        mut second: Source,
        each: Option<Cut>,
    ) -> Result<Compared, ApiError> {
        let Self {
            state,
            context,
            embedding,
            ..
        } = self;
        let cut = self.cut()?;
        if let Some(scorer) = &embedding.scorer {
            let pairs = Pairs {
                first,
                second,
                each,
                whole: cut,
            };
            let prompts = pairs.prompts(state, scorer).await?;
            let texts = Texts::new(state, context, embedding, vec![prompts], false).await?;
            let tokens = texts.count();
            let vectors = embedding.vectors(state, context, texts).await?;
            let scores = vectors.iter().map(|vector| scorer.score(vector));
            let scores = scores.collect::<Result<_, _>>()?;
            return Ok(Compared { scores, tokens });
        }
        (first.cut, second.cut) = (cut, each.or(cut));
        let begin = first.prompts.len();
        let texts = Texts::new(state, context, embedding, vec![first, second], true).await?;
        let tokens = texts.count();
        let mut first = embedding.vectors(state, context, texts).await?;
        let second = first.split_off(begin);
        let pairs = first.iter().cycle().zip(&second);
        let scores = pairs
            .map(|(one, other)| cosine(one, other))
            .collect::<Result<_, _>>()?;
        Ok(Compared { scores, tokens })
    }
}

async fn rank(
    state: &AppState,
    context: &Context,
    embedding: &EmbeddingInfo,
    request: RerankRequest,
) -> Result<Ranking, ApiError> {
    let RerankRequest { common, own } = request;
    state.check_model(common.model.as_deref())?;
    let sides = Sides {
        state,
        context,
        embedding,
        common,
    };
    let per_document = own.max_tokens_per_doc.filter(|&most| most > 0);
    let per_document = per_document.map(|most| most.min(sides.most()) as i64);
    let side = sides.common.truncation_side;
    let each = Cut::new("max_tokens_per_doc", per_document, side, sides.most())?;
    let documents = match own.documents {
        OneOrMany::One(document) => vec![document],
        OneOrMany::Many(documents) => documents,
    };
    let documents: Vec<_> = documents.into_iter().map(Document::into_text).collect();
    let query = Source {
        field: "query",
        prompts: vec![Prompt::Text(own.query)],
        is_list: false,
        cut: None,
    };
    let listed = Source {
        field: "documents",
        prompts: documents.iter().cloned().map(Prompt::Text).collect(),
        is_list: true,
        cut: None,
    };
    let Compared { scores, tokens } = sides.compare(query, listed, each).await?;
    let shows = own.return_documents.unwrap_or(true);
    let ranked = scores.into_iter().zip(documents).enumerate();
    let ranked = ranked.map(|(index, (relevance_score, text))| Ranked {
        index,
        document: shows.then_some(DocumentText { text }),
        relevance_score,
    });
    let mut results: Vec<_> = ranked.collect();
    // Stable: ties keep their order.
    results.sort_by(|a, b| b.relevance_score.total_cmp(&a.relevance_score));
    if let Some(most @ 1..) = own.top_n {
        results.truncate(most);
    }
    let Identity { id, model, .. } = Identity::new("rerank", state, context);
    Ok(Ranking {
        id,
        model,
        usage: EmbeddingUsage::of(tokens),
        results,
    })
}

async fn compare(
    state: &AppState,
    context: &Context,
    embedding: &EmbeddingInfo,
    request: ScoreRequest,
) -> Result<ScoreList, ApiError> {
    let ScoreRequest { common, own } = request;
    state.check_model(common.model.as_deref())?;
    let ScoreFields {
        text_1,
        text_2,
        queries,
        documents,
        items,
        data_1,
        data_2,
    } = own;
    let sides = Sides {
        state,
        context,
        embedding,
        common,
    };
    let first = side([("text_1", text_1), ("queries", queries), ("data_1", data_1)])?;
    let second = [
        ("text_2", text_2),
        ("documents", documents),
        ("items", items),
        ("data_2", data_2),
    ];
    let second = side(second)?;
    let (one, other) = (first.prompts.len(), second.prompts.len());
    if one != 1 && one != other {
        let message = format!(
            "{} has {one} texts and {} has {other}: there must be as many, or only one in {}",
            first.field, second.field, first.field
        );
        return Err(ApiError::invalid(first.field, message));
    }
    let Compared { scores, tokens } = sides.compare(first, second, None).await?;
    let data = scores.into_iter().enumerate().map(|(index, score)| Score {
        index,
        object: "score",
        score,
    });
    let Identity { id, created, model } = Identity::new("score", state, context);
    Ok(ScoreList {
        id,
        object: "list",
        created,
        model,
        data: data.collect(),
        usage: EmbeddingUsage::of(tokens),
    })
}

/// The texts of one side, which has several names, the first of them the usual one.
fn side<const N: usize>(named: [(&'static str, Option<OneOrMany<String>>); N]) -> Result<Source, ApiError> {
    let usual = named[0].0;
    let mut given = named
        .into_iter()
        .filter_map(|(field, texts)| Some((field, texts?)));
    let missing = || ApiError::invalid(usual, format!("missing field `{usual}`"));
    let (field, texts) = given.next().ok_or_else(missing)?;
    if let Some((other, _)) = given.next() {
        let message = format!("{field} and {other} are names of the same texts: send one of them");
        return Err(ApiError::invalid(other, message));
    }
    let is_list = matches!(texts, OneOrMany::Many(_));
    let texts = match texts {
        OneOrMany::One(one) => vec![one],
        OneOrMany::Many(many) => many,
    };
    Ok(Source {
        field,
        prompts: texts.into_iter().map(Prompt::Text).collect(),
        is_list,
        cut: None,
    })
}
