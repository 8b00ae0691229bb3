//! No two modules of one crate need each other, except a module and those inside it: what stands in one can be read
//! without the other.
//!
//! Reads paths (`crate::`, `self::`, `super::`, names of imports and of modules) from the text, and follows imports and
//! re-exports to the module that defines a name. Test modules are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;

use crate::assert_none;
use crate::lexer::code;
use crate::sources::{Source, sources};

/// Names from the crate's root, which is the empty path.
type Path = Vec<String>;

/// What is said in one module: in its file, or between the braces of an inline one.
#[derive(Debug, Default)]
struct Module {
    /// Whether it has a file of its own.
    file: bool,
    /// Name in this module -> path as written.
    imports: BTreeMap<String, Path>,
    /// Paths as written.
    paths: BTreeSet<Path>,
}

type Modules = BTreeMap<Path, Module>;
/// Module -> modules that it needs.
type Needs = BTreeMap<Path, BTreeSet<Path>>;

/// Words, `::`, and single signs.
fn tokens(code: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let word = |c: char| c.is_alphanumeric() || c == '_';
        let length = match first {
            _ if word(first) => rest.find(|c| !word(c)).unwrap_or(rest.len()),
            ':' if rest.starts_with("::") => 2,
            _ => first.len_utf8(),
        };
        tokens.push(&rest[..length]);
        rest = rest[length..].trim_start();
    }
    tokens
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// The module of a file below `src`, which belongs to a crate.
fn module_of(path: &str) -> Option<(&str, Path)> {
    let (name, file) = path.strip_prefix("crates/")?.split_once("/src/")?;
    let names = file.strip_suffix(".rs")?.split('/');
    let mut module: Path = names.map(str::to_owned).collect();
    let last = module.last().map(String::as_str);
    if last == Some("mod") || (module.len() == 1 && matches!(last, Some("lib" | "main"))) {
        module.pop();
    }
    Some((name, module))
}

/// Reads a file into `modules`; returns the modules of tests that it declares.
fn read(modules: &mut Modules, file: Path, text: &str) -> Vec<Path> {
    let code = code(text);
    let tokens = tokens(&code);
    let mut tests = Vec::new();
    // Modules around, each with the depth of braces at which it ends.
    let mut around: Vec<(Path, usize)> = Vec::new();
    let mut here = file;
    modules.entry(here.clone()).or_default().file = true;
    let (mut depth, mut at) = (0, 0);
    while at < tokens.len() {
        match (tokens[at], &tokens[at + 1..]) {
            ("mod", [name, end @ (";" | "{"), ..]) => {
                let path = join(&here, &[(*name).to_owned()]);
                let before = &tokens[..at];
                let before = before.strip_suffix(&["pub", "(", "crate", ")"]).unwrap_or(before);
                if before.ends_with(&["#", "[", "cfg", "(", "test", ")", "]"]) {
                    tests.push(path.clone());
                }
                modules.entry(path.clone()).or_default();
                if *end == "{" {
                    around.push((mem::replace(&mut here, path), depth));
                    depth += 1;
                }
                at += 3;
            }
            ("use", [next, ..]) if *next != "<" => {
                let end = at + tokens[at..].iter().position(|token| *token == ";").unwrap_or(0);
                let module = modules.entry(here.clone()).or_default();
                import(&tokens[at + 1..end.max(at + 1)], &[], module);
                at = end.max(at + 1);
            }
            (word, ["::", ..]) if is_word(word) => {
                let mut path = vec![word.to_owned()];
                while let (Some(&"::"), Some(next)) = (tokens.get(at + 1), tokens.get(at + 2))
                    && is_word(next)
                {
                    path.push((*next).to_owned());
                    at += 2;
                }
                modules.entry(here.clone()).or_default().paths.insert(path);
                at += 1;
            }
            (token, _) => {
                match token {
                    "{" => depth += 1,
                    "}" => depth -= 1,
                    _ => {}
                }
                if around.last().is_some_and(|&(_, end)| end == depth) && token == "}" {
                    here = around.pop().expect("there is one").0;
                }
                at += 1;
            }
        }
    }
    tests
}

/// One `use` tree: what stands between `use` and `;`, behind `before`.
fn import(tree: &[&str], before: &[String], module: &mut Module) {
    let mut path = before.to_vec();
    let mut at = 0;
    while at < tree.len() {
        match tree[at] {
            "{" => {
                let mut depth = 0;
                let inner = &tree[at + 1..tree.len() - 1];
                let branches = inner.split(|token| {
                    match *token {
                        "{" => depth += 1,
                        "}" => depth -= 1,
                        _ => {}
                    }
                    *token == "," && depth == 0
                });
                branches
                    .filter(|branch| !branch.is_empty())
                    .for_each(|branch| import(branch, &path, module));
                return;
            }
            "as" => {
                module.paths.insert(path.clone());
                module.imports.insert(tree[at + 1].to_owned(), path);
                return;
            }
            "*" => {
                module.paths.insert(path);
                return;
            }
            // `use crate::a::{self, B}`
            "self" if !path.is_empty() => {}
            word if is_word(word) => path.push(word.to_owned()),
            _ => {}
        }
        at += 1;
    }
    if let Some(name) = path.last().cloned() {
        module.paths.insert(path.clone());
        module.imports.insert(name, path);
    }
}

fn join(start: &[String], rest: &[String]) -> Path {
    [start, rest].concat()
}

/// The module that defines what `path`, written in `here`, names: none if it is of another crate.
fn resolve(modules: &Modules, here: &[String], path: &[String], hops: usize) -> Option<Path> {
    let (first, rest) = path.split_first()?;
    match first.as_str() {
        "crate" => return Some(descend(modules, Path::new(), rest, hops)),
        "self" => return Some(descend(modules, here.to_vec(), rest, hops)),
        "super" => {
            let parent = &here[..here.len().saturating_sub(1)];
            return match rest.first().map(String::as_str) {
                Some("super") => resolve(modules, parent, rest, hops),
                _ => Some(descend(modules, parent.to_vec(), rest, hops)),
            };
        }
        _ => {}
    }
    if modules.contains_key(&join(here, &path[..1])) {
        return Some(descend(modules, here.to_vec(), path, hops));
    }
    let import = modules.get(here)?.imports.get(first)?;
    // `use serde_json;` and a cycle of imports lead nowhere.
    if hops == 0 || import[..] == path[..1] {
        return None;
    }
    resolve(modules, here, &join(import, rest), hops - 1)
}

/// Goes down from a module, and where a name is imported there, to where that comes from.
fn descend(modules: &Modules, mut module: Path, rest: &[String], hops: usize) -> Path {
    for (at, name) in rest.iter().enumerate() {
        let inner = join(&module, std::slice::from_ref(name));
        if modules.contains_key(&inner) {
            module = inner;
        } else {
            let import = modules.get(&module).and_then(|module| module.imports.get(name));
            let target = import
                .filter(|_| hops > 0)
                .and_then(|import| resolve(modules, &module, &join(import, &rest[at + 1..]), hops - 1));
            return target.unwrap_or(module);
        }
    }
    module
}

/// What the modules with files of one crate need of each other; one that is inside another is left out.
fn needs(files: Vec<(Path, &str)>) -> Needs {
    let mut modules = Modules::new();
    let mut tests = Vec::new();
    for (path, text) in files {
        tests.extend(read(&mut modules, path, text));
    }
    let in_tests = |path: &Path| tests.iter().any(|test| path.starts_with(test));
    let file_of = |path: &Path| {
        let mut path = path.clone();
        while !path.is_empty() && !modules.get(&path).is_some_and(|module| module.file) {
            path.pop();
        }
        path
    };
    let mut needs = Needs::new();
    for (here, module) in modules.iter().filter(|(path, _)| !in_tests(path)) {
        let from = file_of(here);
        let targets = module
            .paths
            .iter()
            .filter_map(|path| resolve(&modules, here, path, 16));
        let targets = targets.map(|target| file_of(&target));
        let apart = targets.filter(|to| !to.starts_with(&from) && !from.starts_with(to) && !in_tests(to));
        needs.entry(from.clone()).or_default().extend(apart);
    }
    needs
}

/// All that can be reached from a module, by one step or more.
fn reachable<'a>(needs: &'a Needs, from: &'a Path) -> BTreeSet<&'a Path> {
    let mut found = BTreeSet::new();
    let mut left = vec![from];
    while let Some(module) = left.pop() {
        left.extend(
            needs
                .get(module)
                .into_iter()
                .flatten()
                .filter(|to| found.insert(*to)),
        );
    }
    found
}

/// One complaint for each set of modules that all need each other, with each import among them.
fn cycles(sources: &[Source]) -> Vec<String> {
    let mut crates: BTreeMap<&str, Vec<(Path, &str)>> = BTreeMap::new();
    for source in sources {
        if let Some((name, module)) = module_of(&source.path) {
            crates.entry(name).or_default().push((module, &source.text));
        }
    }
    let mut complaints = Vec::new();
    for (name, files) in crates {
        let needs = needs(files);
        let reach: BTreeMap<_, _> = needs.keys().map(|from| (from, reachable(&needs, from))).collect();
        let tied = |a: &Path, b: &Path| reach[a].contains(b) && reach.get(b).is_some_and(|b| b.contains(a));
        let mut told: BTreeSet<&Path> = BTreeSet::new();
        for module in needs.keys() {
            let ring: BTreeSet<_> = needs.keys().filter(|other| tied(module, other)).collect();
            if ring.is_empty() || !told.insert(module) {
                continue;
            }
            told.extend(&ring);
            let imports = ring
                .iter()
                .flat_map(|from| needs[*from].iter().map(move |to| (from, to)));
            let imports = imports.filter(|(_, to)| ring.contains(to));
            let list: Vec<_> = imports
                .map(|(from, to)| format!("{} -> {}", from.join("::"), to.join("::")))
                .collect();
            complaints.push(format!(
                "{name}: {} modules import each other: {}",
                ring.len(),
                list.join(", ")
            ));
        }
    }
    complaints
}

#[test]
fn modules_import_one_way() {
    assert_none(cycles(&sources()));
}

#[cfg(test)]
fn complaints(files: &[(&str, &str)]) -> Vec<String> {
    let source = |(path, text): &(&str, &str)| Source {
        path: format!("crates/made-up/src/{path}"),
        text: (*text).to_owned(),
    };
    cycles(&files.iter().map(source).collect::<Vec<_>>())
}

#[test]
fn cycles_are_found() {
    let found = [
        // Plainly.
        &[("a.rs", "use crate::b::B;"), ("b.rs", "use crate::a::A;")][..],
        // Behind a re-export, and by a path in code.
        &[
            ("lib.rs", "mod a; mod b; pub use a::A;"),
            ("a.rs", "fn f() { super::b::g::<u8>() }"),
            ("b.rs", "struct B(crate::A);"),
        ],
        // Behind the name of a module, over three modules, one of them inline.
        &[
            ("a.rs", "use crate::{self as root, b}; fn f() -> b::inner::B {}"),
            ("b/mod.rs", "mod inner;"),
            (
                "b/inner.rs",
                "mod deep { use super::super::super::c::{C, D as E}; }",
            ),
            ("c.rs", "use super::a::*;"),
        ],
    ];
    for files in found {
        assert_eq!(complaints(files).len(), 1, "{files:?}: {:?}", complaints(files));
    }
    let none = [
        // One way.
        &[
            ("a.rs", "use crate::b::B;"),
            ("b.rs", "use std::fmt; // crate::a"),
        ][..],
        // Parent and child, and a re-export whose source needs nothing.
        &[
            ("a/mod.rs", "mod b; pub use b::B; struct A;"),
            ("a/b.rs", "use super::A; use crate::c::C;"),
            ("c.rs", "struct C;"),
        ],
        // In tests.
        &[
            ("a.rs", "use crate::b::B; #[cfg(test)] mod tests;"),
            ("a/tests.rs", "use crate::b::B;"),
            ("b.rs", "#[cfg(test)] mod tests { use crate::a::A; }"),
        ],
    ];
    for files in none {
        assert_none(complaints(files));
    }
}
