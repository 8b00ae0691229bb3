//! Compresses the files of the web pages and lists them for `src/pages.rs`.

use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;

const SERVED: [&str; 5] = ["css", "html", "js", "svg", "woff2"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/pages");
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let mut licences = String::new();
    let mut assets = String::from("&[\n");
    for path in files(Path::new("src/pages"))? {
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let extension = path.extension().unwrap_or_default().to_string_lossy();
        if SERVED.contains(&&*extension) {
            add(&mut assets, &out, &name, &fs::read(&path)?)?;
        } else if name == "LICENSE" {
            let library = path
                .parent()
                .and_then(Path::file_name)
                .unwrap_or_default()
                .to_string_lossy();
            let text = fs::read_to_string(&path)?;
            write!(licences, "{library}\n\n{}\n\n\n", text.trim())?;
        }
    }
    add(&mut assets, &out, "licences.txt", licences.as_bytes())?;
    assets.push(']');
    fs::write(out.join("assets.rs"), assets)?;
    Ok(())
}

/// All files below a directory, in order.
fn files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        match path.is_dir() {
            true => found.extend(files(&path)?),
            false => found.push(path),
        }
    }
    found.sort();
    Ok(found)
}

fn add(assets: &mut String, out: &Path, name: &str, data: &[u8]) -> Result<(), Box<dyn Error>> {
    let compressed = out.join(format!("{name}.gz"));
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(data)?;
    fs::write(&compressed, encoder.finish()?)?;
    writeln!(assets, "    ({name:?}, include_bytes!({compressed:?})),")?;
    Ok(())
}
