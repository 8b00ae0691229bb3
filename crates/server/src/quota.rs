//! Limits of each API key: concurrent requests, requests and tokens per minute.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use parking_lot::Mutex;
use plimsoll_core::TenantId;

use crate::error::{ApiError, Counted};

/// Limits of one key; absent ones do not apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyLimits {
    /// Concurrent HTTP requests.
    pub concurrent_requests: Option<usize>,
    /// HTTP requests per minute; bursts up to all of them are allowed.
    pub requests_per_minute: Option<usize>,
    /// Prompt and output tokens per minute. A request is admitted while any remain, and may then use more.
    pub tokens_per_minute: Option<usize>,
}

impl KeyLimits {
    /// Whether nothing is limited.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// Usage of every key.
#[derive(Debug)]
pub(crate) struct Quotas {
    limits: KeyLimits,
    accounts: Mutex<HashMap<TenantId, Account>>,
}

#[derive(Debug)]
struct Account {
    running: usize,
    requests: Bucket,
    tokens: Bucket,
}

/// A token bucket that holds one minute's worth: initially full, may become negative.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    level: f64,
    at: Instant,
}

/// What remains of one limit, for headers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    counted: Counted,
    limit: usize,
    remaining: f64,
}

impl Bucket {
    fn full(limit: Option<usize>, at: Instant) -> Self {
        let level = limit.unwrap_or(0) as f64;
        Self { level, at }
    }

    /// The level at `now`, refilled at `limit` per minute.
    fn refill(&mut self, limit: usize, now: Instant) -> f64 {
        let limit = limit as f64;
        let came = now.saturating_duration_since(self.at).as_secs_f64() * limit / MINUTE;
        self.level = (self.level + came).min(limit);
        self.at = now;
        self.level
    }
}

impl Quotas {
    pub(crate) fn new(limits: KeyLimits) -> Self {
        Self {
            limits,
            accounts: Mutex::default(),
        }
    }

    /// Counts a request of `tenant` until [`Self::leave`], unless it is refused. Returns what remains either way. Only a
    /// request that `uses_tokens` is refused for want of tokens.
    pub(crate) fn enter(
        &self,
        tenant: TenantId,
        uses_tokens: bool,
        now: Instant,
    ) -> (Vec<Left>, Result<(), ApiError>) {
        let limits = self.limits;
        let mut left = Vec::new();
        if limits.is_none() {
            return (left, Ok(()));
        }
        let mut accounts = self.accounts.lock();
        let account = accounts.entry(tenant).or_insert_with(|| Account {
            running: 0,
            requests: Bucket::full(limits.requests_per_minute, now),
            tokens: Bucket::full(limits.tokens_per_minute, now),
        });
        let full = limits
            .concurrent_requests
            .filter(|&limit| account.running >= limit);
        let mut refused = full.map(ApiError::TooManyAtOnce);
        if let Some(limit) = limits.tokens_per_minute {
            let remaining = account.tokens.refill(limit, now);
            if uses_tokens && remaining <= 0.0 {
                refused.get_or_insert(rate_limited(Counted::Tokens, limit, 1.0 - remaining));
            }
            left.push(Left {
                counted: Counted::Tokens,
                limit,
                remaining,
            });
        }
        if let Some(limit) = limits.requests_per_minute {
            let level = account.requests.refill(limit, now);
            if level < 1.0 {
                refused.get_or_insert(rate_limited(Counted::Requests, limit, 1.0 - level));
            } else if refused.is_none() {
                account.requests.level -= 1.0;
            }
            left.push(Left {
                counted: Counted::Requests,
                limit,
                remaining: account.requests.level,
            });
        }
        account.running += usize::from(refused.is_none());
        (left, refused.map_or(Ok(()), Err))
    }

    /// A request that entered is over.
    pub(crate) fn leave(&self, tenant: TenantId) {
        if let Some(account) = self.accounts.lock().get_mut(&tenant) {
            account.running = account.running.saturating_sub(1);
        }
    }

    /// Charges `tokens` to `tenant`.
    pub(crate) fn spend(&self, tenant: TenantId, tokens: usize) {
        if self.limits.tokens_per_minute.is_none() {
            return;
        }
        if let Some(account) = self.accounts.lock().get_mut(&tenant) {
            account.tokens.level -= tokens as f64;
        }
    }
}

fn rate_limited(counted: Counted, limit: usize, missing: f64) -> ApiError {
    ApiError::RateLimited {
        counted,
        limit,
        retry_after: time_for(missing, limit),
    }
}

/// How long the refill of `count` takes.
fn time_for(count: f64, limit: usize) -> Duration {
    Duration::try_from_secs_f64(count * MINUTE / limit as f64).unwrap_or(Duration::MAX)
}

impl Left {
    /// OpenAI's headers: the limit, what remains, and when it is fully refilled.
    pub(crate) fn write(&self, headers: &mut HeaderMap) {
        let missing = self.limit as f64 - self.remaining;
        let reset = time_for(missing, self.limit).as_secs_f64();
        let [limit, remaining, at] = match self.counted {
            Counted::Requests => REQUEST_HEADERS,
            Counted::Tokens => TOKEN_HEADERS,
        };
        headers.insert(limit, self.limit.into());
        headers.insert(remaining, (self.remaining.max(0.0) as usize).into());
        if let Ok(value) = HeaderValue::from_str(&format!("{reset:.3}s")) {
            headers.insert(at, value);
        }
    }
}

/// Seconds.
const MINUTE: f64 = 60.0;
pub(crate) const REQUEST_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
pub(crate) const TOKEN_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

#[cfg(test)]
mod tests {
    use super::*;

    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);

    fn quotas(concurrent: usize, requests: usize, tokens: usize) -> Quotas {
        let limit = |limit| (limit > 0).then_some(limit);
        Quotas::new(KeyLimits {
            concurrent_requests: limit(concurrent),
            requests_per_minute: limit(requests),
            tokens_per_minute: limit(tokens),
        })
    }

    /// When to come back, in seconds.
    fn refused((_, result): (Vec<Left>, Result<(), ApiError>), what: Counted) -> f64 {
        match result {
            Err(ApiError::RateLimited {
                counted, retry_after, ..
            }) if counted == what => retry_after.as_secs_f64(),
            other => panic!("not refused for {what:?}: {other:?}"),
        }
    }

    #[test]
    fn a_full_burst_is_allowed_then_the_rate_applies() {
        let quotas = quotas(0, 30, 0);
        let begin = Instant::now();
        for _ in 0..30 {
            quotas.enter(A, true, begin).1.unwrap();
        }
        assert!((refused(quotas.enter(A, true, begin), Counted::Requests) - 2.0).abs() < 1e-6);
        quotas.enter(B, true, begin).1.unwrap();
        let later = begin + Duration::from_millis(2001);
        quotas.enter(A, true, later).1.unwrap();
        refused(quotas.enter(A, true, later), Counted::Requests);
    }

    #[test]
    fn used_tokens_are_refilled_over_time() {
        let quotas = quotas(0, 0, 600);
        let begin = Instant::now();
        quotas.enter(A, true, begin).1.unwrap();
        quotas.spend(A, 700);
        let wait = refused(quotas.enter(A, true, begin), Counted::Tokens);
        assert!((wait - 10.1).abs() < 1e-6, "{wait}");
        // Requests that generate nothing need no tokens.
        quotas.enter(A, false, begin).1.unwrap();
        quotas
            .enter(A, true, begin + Duration::from_millis(10_101))
            .1
            .unwrap();
    }

    #[test]
    fn concurrent_requests_are_counted_until_they_end() {
        let quotas = quotas(2, 0, 0);
        let now = Instant::now();
        quotas.enter(A, true, now).1.unwrap();
        quotas.enter(A, true, now).1.unwrap();
        assert!(matches!(
            quotas.enter(A, true, now).1,
            Err(ApiError::TooManyAtOnce(2))
        ));
        quotas.enter(B, true, now).1.unwrap();
        quotas.leave(A);
        quotas.enter(A, true, now).1.unwrap();
    }

    #[test]
    fn a_refusal_reports_what_remains() {
        let quotas = quotas(0, 1, 600);
        let now = Instant::now();
        quotas.enter(A, true, now).1.unwrap();
        let (left, entered) = quotas.enter(A, true, now);
        assert!(entered.is_err());
        let left: Vec<_> = left.iter().map(|left| (left.counted, left.remaining)).collect();
        assert_eq!(left, [(Counted::Tokens, 600.0), (Counted::Requests, 0.0)]);
    }

    #[test]
    fn headers_report_what_remains() {
        let quotas = quotas(0, 60, 0);
        let (left, _) = quotas.enter(A, true, Instant::now());
        let mut headers = HeaderMap::new();
        left.iter().for_each(|left| left.write(&mut headers));
        let of = |name: &str| {
            headers[format!("x-ratelimit-{name}-requests")]
                .to_str()
                .unwrap()
                .to_owned()
        };
        assert_eq!(
            [of("limit"), of("remaining"), of("reset")],
            ["60", "59", "1.000s"]
        );
    }
}
