//! The tables for people who come from other servers: what they name here exists, and what they name there is explained.

use std::collections::BTreeSet;
use std::path::Path;

use clap::CommandFactory;
use plimsoll_cli::args::Cli;
use plimsoll_cli::layers;

const SERVERS: usize = 4;

/// Rows of the tables below "Coming from another server", cell by cell.
fn rows() -> Vec<Vec<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operations.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (_, section) = text.split_once("\n## Coming from another server\n").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let rows = section
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| here |"));
    let rows = rows.filter(|line| !line.starts_with("| there |"));
    rows.map(|line| {
        line.trim_matches('|')
            .split(" |")
            .map(|cell| cell.trim().to_owned())
            .collect()
    })
    .collect()
}

/// The flags of a cell as clap knows them, without dashes.
fn flags(cell: &str) -> Vec<String> {
    let spans = cell.split('`').skip(1).step_by(2);
    let flags = spans.filter_map(|span| span.strip_prefix("--").or_else(|| span.strip_prefix('-')));
    flags
        .map(|flag| flag.split([' ', '=']).next().unwrap().replace('_', "-"))
        .collect()
}

/// Every name of every flag of `serve`: with it, those of the flag it belongs to.
fn same(name: &str) -> Option<BTreeSet<String>> {
    let command = Cli::command();
    let serve = command.find_subcommand("serve").unwrap();
    let names = serve.get_arguments().map(|arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        let names = arg.get_long().into_iter().chain(aliases);
        names.map(str::to_owned).collect::<BTreeSet<_>>()
    });
    names.into_iter().find(|names| names.contains(name))
}

#[test]
fn what_the_tables_name_exists_or_is_explained() {
    let (mut mapped, mut explained) = (0, BTreeSet::new());
    for row in rows() {
        let ours = flags(&row[0]);
        if row.len() == 1 + SERVERS {
            // MODEL has two forms.
            let [first, ..] = ours.as_slice() else {
                panic!("no flag of ours: {row:?}")
            };
            let known = same(first).unwrap_or_else(|| panic!("there is no --{first}"));
            for theirs in row[1..].iter().flat_map(|cell| flags(cell)) {
                mapped += 1;
                match layers::advice(&theirs) {
                    Some(advice) => {
                        assert!(
                            advice.contains(&format!("--{first}")),
                            "--{theirs} and --{first}: {advice}"
                        );
                        explained.insert(theirs);
                    }
                    None => assert!(
                        known.contains(&theirs),
                        "--{theirs} is not --{first}, and not explained"
                    ),
                }
            }
        } else {
            for theirs in ours {
                assert!(layers::advice(&theirs).is_some(), "--{theirs} is not explained");
                explained.insert(theirs);
            }
        }
    }
    assert!(mapped > 60, "{mapped}");
    let missing: Vec<_> = layers::strangers()
        .filter(|name| !explained.contains(*name))
        .collect();
    assert!(missing.is_empty(), "not in the tables: {missing:?}");
}
