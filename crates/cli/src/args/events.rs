//! KV events for routers.

use clap::Args;
use plimsoll_kv_events::Config;

use crate::args::values::json;

/// KV events.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct EventArgs {
    /// Publish the contents of the prefix cache to routers, in vLLM's format: JSON with enable_kv_cache_events, publisher (zmq or
    /// null), endpoint (tcp://*:PORT), replay_endpoint, buffer_steps, hwm, max_queue_size, topic [default: off]
    #[arg(long, value_name = "JSON", value_parser = events)]
    pub kv_events_config: Option<Config>,
}

/// A value that cannot be used is an error of the command line.
fn events(text: &str) -> Result<Config, String> {
    let config: Config = json(text)?;
    config.settings().map_err(|error| error.to_string())?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_vllms_names() {
        let config = r#"{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
            "replay_endpoint": "tcp://*:5558", "buffer_steps": 100, "hwm": 1000, "max_queue_size": 50, "topic": "kv"}"#;
        let settings = events(config).unwrap().settings().unwrap();
        assert!(settings.is_some());
        for (wrong, named) in [
            (r#"{"enabled": true}"#, "enabled"),
            (r#"{"publisher": "kafka"}"#, "kafka"),
            (r#"{"hwm": 0}"#, "hwm"),
            (r#"{"endpoint": "tcp://router:5557"}"#, "tcp://router:5557"),
        ] {
            let error = events(wrong).unwrap_err();
            assert!(error.contains(named), "{wrong}: {error}");
        }
    }
}
