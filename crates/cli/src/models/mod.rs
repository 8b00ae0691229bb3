//! `plimsoll pull`, `list` and `rm`: the models of the Hub cache.

mod in_use;
mod list;
mod pull;
mod rm;

pub use list::list;
pub use pull::pull;
pub use rm::rm;

/// `1 file`, `2 files`.
fn files(count: usize) -> String {
    match count {
        1 => "1 file".to_owned(),
        _ => format!("{count} files"),
    }
}
