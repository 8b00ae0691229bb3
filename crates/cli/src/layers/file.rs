//! The file of `--config`.

use std::path::Path;

use toml::de::DeTable;

use super::{LayerFlag, Layers, Origin, known};
use crate::error::Error;

impl Layers {
    /// The flags that the TOML file `path` sets.
    pub(super) fn file(&self, path: &Path) -> Result<Vec<LayerFlag>, Error> {
        let error = |message: String| Error::Configuration {
            origin: path.display().to_string(),
            message,
        };
        let text = std::fs::read_to_string(path).map_err(|e| error(format!("it cannot be read: {e}")))?;
        let wrong = |e: toml::de::Error| error(e.to_string());
        let table: toml::Table = text.parse().map_err(wrong)?;
        let places = DeTable::parse(&text).map_err(wrong)?;
        let mut flags = Vec::new();
        for (key, place) in places.get_ref().keys().map(|key| (key.get_ref(), key.span())) {
            let line = 1 + text[..place.start].matches('\n').count();
            let error = |message: String| Error::Configuration {
                origin: format!("{}:{line}", path.display()),
                message,
            };
            let name = key.replace('_', "-");
            if name == "config" {
                return Err(error("a configuration file cannot name another one".to_owned()));
            }
            known(&name).map_err(error)?;
            let origin = Origin::File {
                path: path.to_owned(),
                line,
            };
            let flag = self.checked(&name, &table[&**key], origin);
            flags.extend(flag.map_err(|e| error(format!("{key}: {e}")))?);
        }
        Ok(flags)
    }
}
