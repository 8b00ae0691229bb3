use serde::Deserialize;

use crate::address::Address;

/// `--kv-events-config`, under vLLM's names and with its defaults.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Enables events.
    pub enable_kv_cache_events: bool,
    /// Publisher; ZeroMQ by default if events are enabled.
    pub publisher: Option<Kind>,
    /// Where subscribers connect.
    pub endpoint: String,
    /// Where subscribers ask for batches that they missed.
    pub replay_endpoint: Option<String>,
    /// Batches kept for that.
    pub buffer_steps: usize,
    /// Batches that a subscriber may lag behind.
    pub hwm: usize,
    /// Batches that may wait to be published.
    pub max_queue_size: usize,
    /// The first frame of every message.
    pub topic: String,
}

/// Publisher of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Publishes nothing.
    Null,
    /// To subscribers by ZeroMQ.
    Zmq,
}

/// A validated [`Config`] that publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub(crate) endpoint: Address,
    pub(crate) replay_endpoint: Option<Address>,
    pub(crate) buffer_steps: usize,
    pub(crate) hwm: usize,
    pub(crate) max_queue_size: usize,
    pub(crate) topic: String,
}

/// What is wrong with a [`Config`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The endpoint is not one to listen on: subscribers connect to the server.
    #[error(
        "endpoint {0:?} is not an address to listen on: use tcp://*:PORT; this server does not connect to routers, they connect \
         to it"
    )]
    Endpoint(String),
    /// The same for the replay endpoint.
    #[error("replay_endpoint {0:?} is not an address to listen on: use tcp://*:PORT")]
    ReplayEndpoint(String),
    /// A size of 0: nothing would ever be published.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
}

impl Default for Config {
    fn default() -> Self {
        Self {
            enable_kv_cache_events: false,
            publisher: None,
            endpoint: "tcp://*:5557".into(),
            replay_endpoint: None,
            buffer_steps: 10_000,
            hwm: 100_000,
            max_queue_size: 100_000,
            topic: String::new(),
        }
    }
}

impl Config {
    /// Validated settings; `None` if nothing is published.
    ///
    /// # Errors
    /// [`ConfigError`], also if events are disabled.
    pub fn settings(&self) -> Result<Option<Settings>, ConfigError> {
        // vLLM connects to an endpoint without a wildcard; listening on it would mean something else.
        let endpoint = Address::parse(&self.endpoint).filter(Address::is_wildcard);
        let endpoint = endpoint.ok_or_else(|| ConfigError::Endpoint(self.endpoint.clone()))?;
        let replay_endpoint = self.replay_endpoint.as_ref().map(|endpoint| {
            Address::parse(endpoint).ok_or_else(|| ConfigError::ReplayEndpoint(endpoint.clone()))
        });
        for (name, value) in [("hwm", self.hwm), ("max_queue_size", self.max_queue_size)] {
            if value == 0 {
                return Err(ConfigError::Zero(name));
            }
        }
        let settings = Settings {
            endpoint,
            replay_endpoint: replay_endpoint.transpose()?,
            buffer_steps: self.buffer_steps,
            hwm: self.hwm,
            max_queue_size: self.max_queue_size,
            topic: self.topic.clone(),
        };
        let on = self.enable_kv_cache_events && self.publisher != Some(Kind::Null);
        Ok(on.then_some(settings))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on() -> Config {
        Config {
            enable_kv_cache_events: true,
            ..Config::default()
        }
    }

    #[test]
    fn events_are_off_unless_asked_for() {
        assert_eq!(Config::default().settings(), Ok(None));
        let null = Config {
            publisher: Some(Kind::Null),
            ..on()
        };
        assert_eq!(null.settings(), Ok(None));
        assert!(on().settings().unwrap().is_some());
    }

    #[test]
    fn what_cannot_be_done_is_refused() {
        let to = |endpoint: &str| Config {
            endpoint: endpoint.into(),
            ..on()
        };
        for endpoint in ["tcp://router:5557", "ipc:///tmp/events", "*:5557"] {
            assert_eq!(
                to(endpoint).settings(),
                Err(ConfigError::Endpoint(endpoint.into()))
            );
        }
        let replay = Config {
            replay_endpoint: Some("inproc://replay".into()),
            ..on()
        };
        assert_eq!(
            replay.settings(),
            Err(ConfigError::ReplayEndpoint("inproc://replay".into()))
        );
        let hwm = Config { hwm: 0, ..on() };
        assert_eq!(hwm.settings(), Err(ConfigError::Zero("hwm")));
        let queue = Config {
            max_queue_size: 0,
            ..on()
        };
        assert_eq!(queue.settings(), Err(ConfigError::Zero("max_queue_size")));
    }
}
