use std::time::Duration;

use axum::http::{Method, StatusCode};
use metrics::Label;

use super::Metrics;
use super::catalog::*;

/// A finished HTTP request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HttpRequest<'a> {
    pub(crate) method: &'a Method,
    /// The matched route pattern, if any.
    pub(crate) route: Option<&'a str>,
    pub(crate) status: StatusCode,
    /// From its head to the end of its response.
    pub(crate) duration: Duration,
    /// Bytes of the request's body that were read.
    pub(crate) received: u64,
    /// Bytes of the response's body that were sent.
    pub(crate) sent: u64,
}

/// Known methods. Others become `other`, so that clients cannot create labels.
const METHODS: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

/// Ignored fields that have a label of their own. Clients choose their names.
const MAX_FIELDS: usize = 64;
/// The label of all others.
pub(super) const OTHER_FIELD: Label = Label::from_static_parts("field", "other");

impl Metrics {
    /// A request had this field, which was ignored.
    pub(crate) fn ignored(&self, field: &str) {
        let mut fields = self.ignored_fields.lock();
        let is_listed =
            fields.contains(field) || fields.len() < MAX_FIELDS && fields.insert(field.to_owned());
        drop(fields);
        let label = match is_listed {
            true => Label::new("field", field.to_owned()),
            false => OTHER_FIELD,
        };
        let counter = self.maker().counter(&IGNORED_FIELDS, &[label]);
        counter.each(|counter| counter.increment(1));
    }

    /// An HTTP request arrived.
    pub(crate) fn http_began(&self) {
        self.http_in_flight.each(|gauge| gauge.increment(1.0));
    }

    /// A request counted by [`Self::http_began`] ended.
    pub(crate) fn http_ended(&self, exchange: &HttpRequest<'_>) {
        self.http_in_flight.each(|gauge| gauge.decrement(1.0));
        let maker = self.maker();
        let method = METHODS.into_iter().find(|name| *name == exchange.method.as_str());
        let place = [
            Label::new("route", exchange.route.unwrap_or("none").to_owned()),
            Label::from_static_parts("method", method.unwrap_or("other")),
        ];
        let code = Label::new("code", exchange.status.as_str().to_owned());
        let [route, method] = place.clone();
        maker
            .counter(&HTTP_REQUESTS, &[route, method, code])
            .each(|counter| counter.increment(1));
        maker.histogram(&HTTP_SECONDS, &place).record(exchange.duration);
        for (name, bytes) in [(&HTTP_RECEIVED, exchange.received), (&HTTP_SENT, exchange.sent)] {
            maker
                .histogram(name, &place)
                .each(|histogram| histogram.record(bytes as f64));
        }
    }
}
