//! What the integration tests share: readers of answers, where the fetched data lies, and a reader of GGUF metadata. The server's reader is
//! the model crate's, which this crate must not depend on.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use plimsoll_core::{Constraint, MetaValue, Metadata, Progress, mask};
use plimsoll_text::grammar::{GrammarCompiler, GrammarSpec};
use plimsoll_text::{AnswerFormat, AnswerParser, Function, Part, ToolFormat};
use serde_json::Value;

/// `relative` to the repository's `.cache`, which `script` fills.
pub(crate) fn cached(relative: &str, script: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../.cache")
        .join(relative);
    assert!(
        path.exists(),
        "{} is missing: run {script} first (`make test` does)",
        path.display()
    );
    path
}

pub(crate) fn vocabulary(name: &str) -> Metadata {
    read_metadata(&cached(
        &format!("test-data/llama.cpp/vocab/{name}.gguf"),
        "scripts/fetch-test-data",
    ))
}

pub(crate) fn smollm2() -> Metadata {
    read_metadata(&cached(
        "models/SmolLM2-135M-Instruct.Q4_1.gguf",
        "scripts/fetch-default-model",
    ))
}

fn read_metadata(path: &Path) -> Metadata {
    let mut file = BufReader::new(File::open(path).unwrap());
    metadata(&mut file).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Version 2 and 3: magic, version, number of tensors, then the key-value pairs.
fn metadata(file: &mut impl Read) -> io::Result<Metadata> {
    assert_eq!(&bytes::<4>(file)?, b"GGUF");
    assert!(
        matches!(u32::from_le_bytes(bytes(file)?), 2 | 3),
        "another version of GGUF"
    );
    let _tensors = u64::from_le_bytes(bytes(file)?);
    let pairs = u64::from_le_bytes(bytes(file)?);
    (0..pairs)
        .map(|_| {
            let key = string(file)?;
            let kind = u32::from_le_bytes(bytes(file)?);
            Ok((key, value(file, kind)?))
        })
        .collect()
}

fn bytes<const N: usize>(file: &mut impl Read) -> io::Result<[u8; N]> {
    let mut buffer = [0; N];
    file.read_exact(&mut buffer)?;
    Ok(buffer)
}

fn string(file: &mut impl Read) -> io::Result<String> {
    let mut buffer = vec![0; u64::from_le_bytes(bytes(file)?) as usize];
    file.read_exact(&mut buffer)?;
    String::from_utf8(buffer).map_err(io::Error::other)
}

fn value(file: &mut impl Read, kind: u32) -> io::Result<MetaValue> {
    Ok(match kind {
        0 => MetaValue::UInt(u8::from_le_bytes(bytes(file)?).into()),
        1 => MetaValue::Int(i8::from_le_bytes(bytes(file)?).into()),
        2 => MetaValue::UInt(u16::from_le_bytes(bytes(file)?).into()),
        3 => MetaValue::Int(i16::from_le_bytes(bytes(file)?).into()),
        4 => MetaValue::UInt(u32::from_le_bytes(bytes(file)?).into()),
        5 => MetaValue::Int(i32::from_le_bytes(bytes(file)?).into()),
        6 => MetaValue::Float(f32::from_le_bytes(bytes(file)?).into()),
        7 => MetaValue::Bool(bytes::<1>(file)?[0] != 0),
        8 => MetaValue::Str(string(file)?),
        9 => {
            let kind = u32::from_le_bytes(bytes(file)?);
            let length = u64::from_le_bytes(bytes(file)?);
            MetaValue::List(
                (0..length)
                    .map(|_| value(file, kind))
                    .collect::<io::Result<_>>()?,
            )
        }
        10 => MetaValue::UInt(u64::from_le_bytes(bytes(file)?)),
        11 => MetaValue::Int(i64::from_le_bytes(bytes(file)?)),
        12 => MetaValue::Float(f64::from_le_bytes(bytes(file)?)),
        _ => return Err(io::Error::other(format!("value of kind {kind}"))),
    })
}

/// An answer put together again.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Whole {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    /// Names, and arguments as they are told.
    pub(crate) calls: Vec<(String, String)>,
}

impl Whole {
    pub(crate) fn add(&mut self, parts: Vec<Part>) {
        for part in parts {
            match part {
                Part::Reasoning(text) => self.reasoning += &text,
                Part::Content(text) => self.content += &text,
                Part::Call { name } => self.calls.push((name, String::new())),
                Part::Arguments(text) => self.calls.last_mut().expect("a call began").1 += &text,
            }
        }
    }

    /// With the arguments parsed.
    pub(crate) fn parsed(&self) -> Vec<(&str, Value)> {
        let parse = |text: &str| serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        self.calls
            .iter()
            .map(|(name, arguments)| (name.as_str(), parse(arguments)))
            .collect()
    }
}

/// Content, and calls with their arguments as they are told.
pub(crate) fn told(
    format: ToolFormat,
    functions: &Arc<[Function]>,
    text: &str,
) -> (String, Vec<(String, String)>) {
    let mut parser = AnswerParser::new(&AnswerFormat {
        tools: Some(format),
        functions: Arc::clone(functions),
        ..AnswerFormat::default()
    });
    let mut whole = Whole::default();
    whole.add(parser.push(text));
    whole.add(parser.finish());
    (whole.reasoning + &whole.content, whole.calls)
}

/// Content and calls of an answer.
pub(crate) fn read(
    format: ToolFormat,
    functions: &Arc<[Function]>,
    text: &str,
) -> (String, Vec<(String, Value)>) {
    let (content, calls) = told(format, functions, text);
    let parse = |(name, text): (String, String)| {
        let arguments = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        (name, arguments)
    };
    (content, calls.into_iter().map(parse).collect())
}

/// How much of `text` the grammar allows, and whether it may end there.
pub(crate) fn follow(compiler: &GrammarCompiler, lark: &str, text: &str) -> (usize, bool) {
    const END: u32 = 256;
    let compiled = compiler.compile(&GrammarSpec::Lark(lark.to_owned()).into());
    let compiled = compiled.unwrap_or_else(|error| panic!("{error}\n{lark}"));
    let mut constraint = compiled.constraint(&[END]);
    let mut complete = false;
    for (taken, byte) in text.bytes().enumerate() {
        if complete || !allows(constraint.as_mut(), byte.into()) {
            return (taken, false);
        }
        complete = constraint.accept(byte.into()).unwrap() == Progress::Complete;
    }
    (text.len(), complete || allows(constraint.as_mut(), END))
}

fn allows(constraint: &mut dyn Constraint, token: u32) -> bool {
    let mut mask = [u32::MAX; 9];
    constraint.restrict(&mut mask).unwrap();
    mask::allows(&mask, token)
}
