//! Compiles `kernels/*.cu` into one fatbin each and writes the list of them as `images.rs`, which `src/cuda/image.rs`
//! includes. Without the feature `cuda` the list is empty and nothing of CUDA is needed.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, thread};

/// Machine code for the GPUs people have, and PTX, which the driver compiles at first use, for newer ones.
const DEFAULT_ARCHS: &str = "80 86 89 90a 100 120 compute_90";
/// First release with everything the kernels use.
const OLDEST_NVCC: (u32, u32) = (12, 8);

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            for line in message.lines() {
                println!("cargo::error={line}");
            }
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let out = directory("OUT_DIR")?;
    let mut images = Vec::new();
    let mut hopper = false;
    if env::var_os("CARGO_FEATURE_CUDA").is_some() {
        let root = directory("CARGO_MANIFEST_DIR")?.join("../..");
        let kernels = root.join("kernels");
        println!("cargo::rerun-if-changed={}", kernels.display());
        println!("cargo::rerun-if-env-changed=CUDA_HOME");
        println!("cargo::rerun-if-env-changed=CUDA_ARCHS");
        let compiler = Compiler::new(&root, &kernels)?;
        images = compile_all(&compiler, &files(&kernels, "cu")?, &out)?;
        hopper = compiler.hopper;
    }
    let path = out.join("images.rs");
    fs::write(&path, list(&images, hopper)).map_err(|e| format!("{}: {e}", path.display()))
}

/// A directory that cargo names. Asked for at run time: checkouts that share a target directory share this program.
fn directory(variable: &str) -> Result<PathBuf, String> {
    let path = env::var_os(variable).ok_or_else(|| format!("{variable} is not set"))?;
    Ok(PathBuf::from(path))
}

/// `images.rs`: `static IMAGES: &[(&str, &[u8])]`, name and bytes of each file, and whether there is code for Hopper alone.
fn list(images: &[Image], hopper: bool) -> String {
    // `include_bytes!` promises no alignment; the driver reads the header of an image in words.
    let mut text = String::new();
    if !images.is_empty() {
        text += "#[repr(C, align(16))]\nstruct Aligned<T>(T);\n\n";
    }
    text += "static IMAGES: &[(&str, &[u8])] = &[\n";
    for Image { name, file } in images {
        text += &format!("    ({name:?}, &Aligned(*include_bytes!({file:?})).0),\n");
    }
    text + &format!("];\nconst HOPPER: bool = {hopper};\n")
}

/// One compiled file: its name without ending, and its file in `OUT_DIR`.
struct Image {
    name: String,
    file: String,
}

/// nvcc, and what decides its output besides the file it compiles.
struct Compiler {
    nvcc: PathBuf,
    arguments: Vec<String>,
    /// Whether it compiles for Hopper with its own instructions.
    hopper: bool,
    /// Of the arguments, the compiler's version and all headers.
    hash: DefaultHasher,
}

impl Compiler {
    fn new(root: &Path, kernels: &Path) -> Result<Self, String> {
        let (nvcc, version) = find_nvcc(root)?;
        let include = kernels.join("include");
        let mut arguments: Vec<String> = ["-fatbin", "-std=c++17", "-O3", "-Xptxas", "--warn-on-spills"]
            .map(str::to_owned)
            .to_vec();
        let architectures = architectures(&env::var("CUDA_ARCHS").unwrap_or_default())?;
        arguments.extend(architectures.iter().map(Architecture::argument));
        let mut hash = DefaultHasher::new();
        (&version, &arguments).hash(&mut hash);
        for header in files(&include, "cuh")? {
            (&header, read(&header)?).hash(&mut hash);
        }
        arguments.extend(["-I".to_owned(), include.display().to_string()]);
        Ok(Self {
            nvcc,
            arguments,
            hopper: architectures
                .iter()
                .any(|architecture| architecture.number == "90a"),
            hash,
        })
    }

    /// Compiles one file, unless that was done before.
    fn compile(&self, source: &Path, out: &Path, threads: usize) -> Result<Image, String> {
        let name = source
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let mut hash = self.hash.clone();
        read(source)?.hash(&mut hash);
        let file = format!("{name}-{:016x}.fatbin", hash.finish());
        let target = out.join(&file);
        if !target.exists() {
            // Renamed when whole, so that a compiler that was stopped leaves nothing that looks done.
            let part = out.join(format!("{file}.part"));
            let mut command = Command::new(&self.nvcc);
            command.args(&self.arguments).arg(format!("--threads={threads}"));
            command.arg("-o").arg(&part).arg(source);
            let output = command
                .output()
                .map_err(|e| format!("{}: {e}", self.nvcc.display()))?;
            let messages = [output.stdout, output.stderr].concat();
            let messages = String::from_utf8_lossy(&messages);
            if !output.status.success() {
                return Err(format!("{command:?} failed:\n{messages}"));
            }
            for line in messages.lines().filter(|line| !line.trim().is_empty()) {
                println!("cargo::warning={line}");
            }
            fs::rename(&part, &target).map_err(|e| format!("{}: {e}", part.display()))?;
        }
        Ok(Image { name, file })
    }
}

/// Compiles all files, as many at once as cargo allows jobs.
fn compile_all(compiler: &Compiler, sources: &[PathBuf], out: &Path) -> Result<Vec<Image>, String> {
    let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok());
    let jobs: usize = jobs.unwrap_or(1).max(1);
    // What is left of the jobs compiles the architectures of a file side by side.
    let threads = (jobs / sources.len().max(1)).max(1);
    let next = AtomicUsize::new(0);
    let work = || {
        let mut images = Vec::new();
        while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
            images.push(compiler.compile(source, out, threads)?);
        }
        Ok::<_, String>(images)
    };
    let mut images = thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.min(sources.len())).map(|_| scope.spawn(work)).collect();
        let mut images = Vec::new();
        for worker in workers {
            images.extend(
                worker
                    .join()
                    .map_err(|_| "a compile thread panicked".to_owned())??,
            );
        }
        Ok::<_, String>(images)
    })?;
    images.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(images)
}

/// What kernels are compiled for.
struct Architecture {
    /// PTX instead of machine code.
    ptx: bool,
    /// Compute capability without its point; with an `a`, for this one alone.
    number: String,
}

impl Architecture {
    /// For nvcc.
    fn argument(&self) -> String {
        let Self { ptx, number } = self;
        let code = if *ptx { "compute" } else { "sm" };
        format!("-gencode=arch=compute_{number},code={code}_{number}")
    }
}

/// Those of a list such as `80 90a compute_90`: a number is machine code for that compute capability, `compute_` and a number PTX.
fn architectures(list: &str) -> Result<Vec<Architecture>, String> {
    let list = if list.trim().is_empty() {
        DEFAULT_ARCHS
    } else {
        list
    };
    let entries = list.split([' ', ',']).filter(|entry| !entry.is_empty());
    let architectures = entries.map(|entry| {
        let (ptx, number) = match entry.strip_prefix("compute_") {
            Some(number) => (true, number),
            None => (false, entry.strip_prefix("sm_").unwrap_or(entry)),
        };
        let digits = number.trim_end_matches(['a', 'f']);
        if digits.len() < 2 || number.len() > digits.len() + 1 || !digits.bytes().all(|b| b.is_ascii_digit())
        {
            return Err(format!(
                "CUDA_ARCHS: {entry:?} is not an architecture; {DEFAULT_ARCHS:?} is the default"
            ));
        }
        // Hopper's own instructions need the `a`, and no other GPU has capability 9.0.
        let number = if number == "90" && !ptx { "90a" } else { number };
        Ok(Architecture {
            ptx,
            number: number.to_owned(),
        })
    });
    architectures.collect()
}

/// The first nvcc that is new enough, of `CUDA_HOME`, `PATH` and what `scripts/install-cuda` installs; its version text.
fn find_nvcc(root: &Path) -> Result<(PathBuf, String), String> {
    let mut places = Vec::new();
    if let Some(home) = env::var_os("CUDA_HOME") {
        places.push(Path::new(&home).join("bin/nvcc"));
    }
    places.push(PathBuf::from("nvcc"));
    places.push(root.join(".cuda/nvidia/cu13/bin/nvcc"));
    let mut tried = String::new();
    for nvcc in places {
        let output = Command::new(&nvcc).arg("--version").output();
        let problem = match output {
            Ok(output) if output.status.success() => {
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                match release(&text) {
                    Some(found) if found >= OLDEST_NVCC => return Ok((nvcc, text)),
                    Some((major, minor)) => format!("is release {major}.{minor}"),
                    None => "does not say its release".to_owned(),
                }
            }
            Ok(output) => format!("ended with {}", output.status),
            Err(error) => error.to_string(),
        };
        tried += &format!("\n  {}: {problem}", nvcc.display());
    }
    let (major, minor) = OLDEST_NVCC;
    Err(format!(
        "the feature `cuda` needs nvcc {major}.{minor} or newer: run `make cuda`, or scripts/install-cuda once, or set CUDA_HOME\n\
         looked for{tried}"
    ))
}

/// `(13, 0)` of nvcc's "release 13.0,".
fn release(text: &str) -> Option<(u32, u32)> {
    let rest = text.split("release ").nth(1)?;
    let (major, minor) = rest.split(',').next()?.trim().split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The files of a directory with this ending, in order.
fn files(dir: &Path, ending: &str) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let paths: Result<Vec<_>, _> = entries.map(|entry| entry.map(|e| e.path())).collect();
    let mut paths = paths.map_err(|e| format!("{}: {e}", dir.display()))?;
    paths.retain(|path| path.extension().is_some_and(|e| e == ending));
    paths.sort();
    Ok(paths)
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|e| format!("{}: {e}", path.display()))
}
