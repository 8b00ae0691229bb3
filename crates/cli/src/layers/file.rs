//! The file of `--config`.

use std::path::Path;

use toml::de::DeTable;

use super::{LayerFlag, Layers, Origin, known};
use crate::error::Error;

impl Layers {
    /// The flags that the TOML file `path` sets.
    pub(super) fn file(&self, path: &Path) -> Result<Vec<LayerFlag>, Error> {
        let error = |message: String| Error::configuration(path.display(), message);
        let text = std::fs::read_to_string(path).map_err(Error::unreadable("--config", path))?;
        let wrong = |e: toml::de::Error| {
            let yaml = path.extension().is_some_and(|end| end == "yaml" || end == "yml");
            let hint = if yaml {
                "TOML is expected, `key = value`, and no YAML: "
            } else {
                ""
            };
            error(format!("{hint}{e}"))
        };
        let table: toml::Table = text.parse().map_err(wrong)?;
        let places = DeTable::parse(&text).map_err(wrong)?;
        let mut flags = Vec::new();
        // As it is read by people.
        let mut keys: Vec<_> = places.get_ref().keys().collect();
        keys.sort_by_key(|key| key.span().start);
        for (key, place) in keys.into_iter().map(|key| (key.get_ref(), key.span())) {
            let line = 1 + text[..place.start].matches('\n').count();
            let path = path.to_owned();
            let origin = Origin::File { path, line };
            let error = |message: String| Error::configuration(&origin, message);
            let name = key.replace('_', "-");
            if name == "config" {
                return Err(error(
                    "a configuration file cannot include another one".to_owned(),
                ));
            }
            known(&name).map_err(error)?;
            let flag = self.checked(&name, &table[&**key], origin.clone());
            if let Some(flag) = flag.map_err(|e| error(format!("{key}: {e}")))? {
                flag.beside(&flags).map_err(error)?;
                flags.push(flag);
            }
        }
        Ok(flags)
    }
}
