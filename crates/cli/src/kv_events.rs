//! Routers that listen to the prefix cache.

use std::sync::Arc;

use plimsoll_core::CacheListener;
use plimsoll_kv_events::Publisher;

use crate::error::Error;
use crate::serve_settings::ServeSettings;

/// Listens for routers, if there are to be events, and tells them from here on. Returns what the engine is to fill.
pub(crate) fn publish(settings: &ServeSettings) -> Result<Option<Arc<dyn CacheListener>>, Error> {
    let wrong = |message: &str| Error::configuration("--kv-events-config", message);
    let publisher = settings.kv_events.settings();
    let Some(publisher) = publisher.map_err(|error| wrong(&error.to_string()))? else {
        return Ok(None);
    };
    if !settings.engine.prefix_caching {
        return Err(wrong(
            "KV events need the prefix cache: leave out --no-enable-prefix-caching",
        ));
    }
    let publisher = Publisher::bind(publisher)?;
    let queue = publisher.queue();
    tokio::spawn(async move {
        if let Err(error) = publisher.run().await {
            tracing::error!(%error, "KV events are no longer published");
        }
    });
    Ok(Some(Arc::new(queue)))
}
