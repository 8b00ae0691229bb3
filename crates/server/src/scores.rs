//! Log-probabilities in responses.

use plimsoll_core::{PromptLogprob, TokenId};
use plimsoll_text::Tokenizer;
use serde_json::{Map, Value, json};

use crate::wire::extra::ScoredToken;

/// JSON has no infinity; OpenAI uses this value.
const LOWEST_LOGPROB: f32 = -9999.0;

/// A log-probability as reported in all responses.
pub(crate) fn number(logprob: f32) -> f64 {
    f64::from(logprob.max(LOWEST_LOGPROB))
}

/// A token's name where tokens are named by id.
pub(crate) fn token_id(token: TokenId) -> String {
    format!("token_id:{token}")
}

/// Log-probabilities of a prompt in vLLM's format, one entry per token: `null` for the first, then the token itself and the
/// `top` likeliest, by id.
pub(crate) fn prompt_logprobs(
    prompt: &[PromptLogprob],
    top: usize,
    tokenizer: &Tokenizer,
) -> Vec<Option<Map<String, Value>>> {
    let one = |scored: &PromptLogprob| {
        let entry = |token, logprob, rank: u32| {
            json!(ScoredToken {
                logprob: number(logprob),
                rank,
                decoded_token: tokenizer.token_str(token),
            })
        };
        let own = entry(scored.token, scored.logprob, scored.rank);
        let mut entries = Map::from_iter([(scored.token.to_string(), own)]);
        for (likeliest, rank) in scored.top.iter().take(top).zip(1..) {
            entries
                .entry(likeliest.token.to_string())
                .or_insert_with(|| entry(likeliest.token, likeliest.logprob, rank));
        }
        entries
    };
    let scored = prompt.iter().map(|scored| Some(one(scored)));
    std::iter::once(None).chain(scored).collect()
}

#[cfg(test)]
mod tests {
    use plimsoll_core::TokenLogprob;

    use super::*;

    #[test]
    fn the_prompts_own_token_comes_first_and_once() {
        let top = |token, logprob| TokenLogprob { token, logprob };
        let scored = |token, logprob, rank| PromptLogprob {
            token,
            logprob,
            rank,
            top: vec![top(98, -0.5), top(97, f32::NEG_INFINITY)],
        };
        let prompt = [scored(99, -3.0, 7), scored(98, -0.5, 1)];
        let found = prompt_logprobs(&prompt, 2, &Tokenizer::bytes());
        let expected = json!([
            null,
            {
                "99": {"logprob": -3.0, "rank": 7, "decoded_token": "c"},
                "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
                "97": {"logprob": -9999.0, "rank": 2, "decoded_token": "a"},
            },
            {
                "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
                "97": {"logprob": -9999.0, "rank": 2, "decoded_token": "a"},
            },
        ]);
        assert_eq!(json!(found), expected);
        let first = found[1].as_ref().unwrap().keys().next().unwrap();
        assert_eq!(first, "99");
        let own = prompt_logprobs(&prompt, 0, &Tokenizer::bytes());
        assert_eq!(own[1].as_ref().unwrap().len(), 1);
        assert_eq!(prompt_logprobs(&[], 5, &Tokenizer::bytes()), [None]);
    }
}
