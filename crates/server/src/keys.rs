//! API keys.

use std::fmt;
use std::sync::Arc;

use axum::http::{HeaderMap, header};
use parking_lot::RwLock;
use plimsoll_core::TenantId;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::error::ApiError;

type Hash = [u8; 32];

/// A key's hash and its name in logs. The key itself is not kept.
#[derive(Clone)]
pub struct ApiKey {
    name: Arc<str>,
    hash: Hash,
}

/// Why a text is not a valid key. Never contains the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// It is empty.
    #[error("a key must not be empty")]
    Empty,
    /// It has characters that a header cannot hold.
    #[error("a key must be visible ASCII without spaces")]
    NotPlain,
}

impl ApiKey {
    /// A key called `name`, or named after its hash. Keys of one name share their limits, so that a key can be rotated while
    /// both are valid.
    ///
    /// # Errors
    /// If `secret` is empty or has characters that a header cannot hold.
    pub fn new(name: Option<&str>, secret: &str) -> Result<Self, KeyError> {
        if secret.is_empty() {
            return Err(KeyError::Empty);
        }
        if !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(KeyError::NotPlain);
        }
        let hash: Hash = Sha256::digest(secret).into();
        let name = match name {
            Some(name) => name.into(),
            // 32 bits of its hash do not reveal a long random key.
            None => format!("sha256:{:08x}", first_word(&hash) >> 32).into(),
        };
        Ok(Self { name, hash })
    }

    /// Its name in logs.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKey({})", self.name)
    }
}

/// The valid keys; clones share them. If there are none at the start, no key is required.
#[derive(Clone, Debug, Default)]
pub struct ApiKeys {
    keys: Arc<RwLock<Arc<[ApiKey]>>>,
    required: bool,
}

/// Who sent a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tenant {
    pub(crate) id: TenantId,
    pub(crate) name: Arc<str>,
}

impl Tenant {
    /// The owner of the key called `name`.
    pub(crate) fn named(name: Arc<str>) -> Self {
        Self {
            id: TenantId(first_word(&Sha256::digest(name.as_bytes()).into())),
            name,
        }
    }
}

impl ApiKeys {
    /// Requires one of `keys`, unless there are none.
    pub fn new(keys: Vec<ApiKey>) -> Self {
        Self {
            required: !keys.is_empty(),
            keys: Arc::new(RwLock::new(keys.into())),
        }
    }

    /// Replaces the valid keys. A server that requires keys still does, even if none are left.
    pub fn replace(&self, keys: Vec<ApiKey>) {
        *self.keys.write() = keys.into();
    }

    /// Whether requests need a key.
    pub fn required(&self) -> bool {
        self.required
    }

    /// Whether there are keys of several owners, who take turns.
    pub(crate) fn are_several(&self) -> bool {
        let keys = self.keys.read();
        keys.windows(2).any(|pair| pair[0].name != pair[1].name)
    }

    /// The sender of a request with these headers; `None` where no key is required.
    pub(crate) fn tenant(&self, headers: &HeaderMap) -> Result<Option<Tenant>, ApiError> {
        if !self.required {
            return Ok(None);
        }
        let secret = presented(headers).ok_or(ApiError::NoKey)?;
        self.find(secret).map(Some).ok_or(ApiError::WrongKey)
    }

    /// Compares hashes, and always all of them, in constant time: timing reveals neither part of a key nor its owner.
    fn find(&self, secret: &[u8]) -> Option<Tenant> {
        let hash: Hash = Sha256::digest(secret).into();
        let keys = Arc::clone(&self.keys.read());
        let mut found = None;
        for key in keys.iter() {
            if bool::from(key.hash.ct_eq(&hash)) {
                found = Some(key);
            }
        }
        found.map(|key| Tenant::named(Arc::clone(&key.name)))
    }
}

fn first_word(hash: &Hash) -> u64 {
    hash[..8]
        .iter()
        .fold(0, |word, &byte| (word << 8) | u64::from(byte))
}

/// The key of `Authorization: Bearer KEY`, or of Anthropic's `x-api-key`.
fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    const BEARER: &[u8] = b"bearer ";
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, rest) = value.as_bytes().split_at_checked(BEARER.len())?;
        scheme.eq_ignore_ascii_case(BEARER).then_some(rest.trim_ascii())
    });
    bearer.or_else(|| Some(headers.get("x-api-key")?.as_bytes().trim_ascii()))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn keys() -> ApiKeys {
        ApiKeys::new(vec![
            ApiKey::new(Some("alice"), "secret-a").unwrap(),
            ApiKey::new(Some("bob"), "secret-b").unwrap(),
            ApiKey::new(Some("alice"), "secret-a2").unwrap(),
            ApiKey::new(None, "nameless").unwrap(),
        ])
    }

    fn name(keys: &ApiKeys, header: &'static str, value: &'static str) -> Option<String> {
        let headers = HeaderMap::from_iter([(
            header::HeaderName::from_static(header),
            HeaderValue::from_static(value),
        )]);
        Some(keys.tenant(&headers).ok()??.name.to_string())
    }

    #[test]
    fn keys_of_one_name_have_one_owner() {
        let alice = |secret| ApiKey::new(Some("alice"), secret).unwrap();
        assert!(!ApiKeys::default().are_several());
        let of_one = ApiKeys::new(vec![alice("a"), alice("b")]);
        assert!(keys().are_several() && !of_one.are_several());
        of_one.replace(vec![alice("a"), ApiKey::new(None, "c").unwrap()]);
        assert!(of_one.are_several());
    }

    #[test]
    fn keys_are_found_in_both_headers() {
        let keys = keys();
        let alice = Some("alice".to_owned());
        assert_eq!(name(&keys, "authorization", "Bearer secret-a"), alice);
        assert_eq!(name(&keys, "authorization", "bearer  secret-a2"), alice);
        assert_eq!(name(&keys, "x-api-key", "secret-b"), Some("bob".to_owned()));
        for wrong in [
            "Bearer secret",
            "Bearer secret-aa",
            "Bearer ",
            "Basic secret-a",
            "secret-a",
            "",
        ] {
            assert_eq!(name(&keys, "authorization", wrong), None, "{wrong}");
        }
        assert_eq!(name(&keys, "x-api-key", ""), None);
    }

    #[test]
    fn keys_of_one_name_share_a_tenant_and_debug_output_hides_secrets() {
        let keys = keys();
        let id = |secret: &str| keys.find(secret.as_bytes()).unwrap().id;
        assert_eq!(id("secret-a"), id("secret-a2"));
        assert_ne!(id("secret-a"), id("secret-b"));
        let shown = format!("{keys:?} {}", ApiKey::new(None, "a b").unwrap_err());
        assert!(
            !shown.contains("secret") && !shown.contains("nameless"),
            "{shown}"
        );
        assert!(shown.contains("sha256:"), "{shown}");
    }

    #[test]
    fn replaced_keys_are_refused_and_an_empty_list_admits_nobody() {
        let keys = keys();
        keys.replace(vec![ApiKey::new(None, "new").unwrap()]);
        assert_eq!(name(&keys, "x-api-key", "secret-a"), None);
        assert!(name(&keys, "x-api-key", "new").is_some());
        keys.replace(Vec::new());
        assert!(matches!(keys.tenant(&HeaderMap::new()), Err(ApiError::NoKey)));
        assert_eq!(ApiKeys::default().tenant(&HeaderMap::new()).unwrap(), None);
    }

    #[test]
    fn invalid_keys_are_refused() {
        assert_eq!(ApiKey::new(None, "").unwrap_err(), KeyError::Empty);
        for wrong in ["a b", "ä", "a\n"] {
            assert_eq!(ApiKey::new(None, wrong).unwrap_err(), KeyError::NotPlain);
        }
    }
}
