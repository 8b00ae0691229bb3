use super::*;
use crate::args;

fn serve(argv: &str, environment: &[(&str, &str)]) -> Result<ServeArgs, Error> {
    let argv = argv.split_whitespace().map(OsString::from).collect();
    let environment = environment.iter().map(|&(k, v)| (k.to_owned(), v.into()));
    match parse(argv, environment.collect())?.command {
        args::Command::Serve(args) => Ok(*args),
        other => panic!("not serve: {other:?}"),
    }
}

fn refused(argv: &str, environment: &[(&str, &str)]) -> String {
    serve(argv, environment).unwrap_err().to_string()
}

/// A file with `text`, and the command line that names it.
fn config(text: &str) -> (tempfile::NamedTempFile, String) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let argv = format!("plimsoll serve --config {}", file.path().display());
    (file, argv)
}

#[test]
fn flags_beat_environment_beats_file_beats_defaults() {
    let (_file, argv) =
        config("port = 1\nmax_num_seqs = 1\nblock-size = 8\nserved-model-name = [\"a\", \"b\"]\n");
    let environment = [("PLIMSOLL_PORT", "2"), ("PLIMSOLL_MAX_NUM_SEQS", "2")];
    let args = serve(&format!("{argv} --port 3"), &environment).unwrap();
    assert_eq!(args.server.port, 3);
    assert_eq!(args.engine.limits.max_num_seqs, Some(2));
    assert_eq!(args.engine.limits.block_size.tokens(), 8);
    assert_eq!(args.server.served_model_name.unwrap(), ["a", "b"]);
    assert_eq!(args.engine.limits.max_num_batched_tokens, None);
}

#[test]
fn a_later_layer_wins_over_what_it_contradicts() {
    let (_file, with_file) = config("max-total-token-num = 64\ngpu-memory-utilization = 0.5\n");
    let memory = |argv: &str, environment: &[(&str, &str)]| {
        let args = serve(&format!("{with_file} {argv}"), environment).unwrap();
        args.engine.memory
    };
    let pins = |memory: &args::MemoryArgs| (memory.max_total_token_num, memory.kv_cache_memory_bytes);
    assert_eq!(pins(&memory("", &[])).0, Some(64));
    let bytes = Some(crate::bytes::Bytes(9));
    assert_eq!(pins(&memory("--kv-cache-memory-bytes 9", &[])), (None, bytes));
    let variable = [("PLIMSOLL_KV_CACHE_MEMORY_BYTES", "9")];
    assert_eq!(pins(&memory("", &variable)), (None, bytes));
    let flag = "--max-total-token-num 3";
    assert_eq!(pins(&memory(flag, &variable)), (Some(3), None));
    let typed = memory("--max-device-memory 1GiB", &[]);
    assert_eq!(typed.device_memory, Some(crate::bytes::Bytes(1 << 30)));
    assert_eq!(typed.gpu_memory_utilization, None);
    // The alias is a name in every layer. What contradicts itself within one is an error.
    let alias = [("PLIMSOLL_MAX_DEVICE_MEMORY", "7")];
    assert_eq!(memory("", &alias).device_memory, Some(crate::bytes::Bytes(7)));
    let both = "plimsoll serve --max-total-token-num 3 --kv-cache-memory-bytes 9";
    assert!(matches!(serve(both, &[]), Err(Error::Clap(_))));
}

#[test]
fn switches_and_lists_and_the_model_are_overridden_whole() {
    let (_file, with_file) =
        config("enable-prefix-caching = false\nmodel = \"from/file\"\nserved-model-name = [\"a\", \"b\"]\n");
    let args = serve(&with_file, &[]).unwrap();
    assert!(!args.engine.limits.prefix_caching());
    assert_eq!(args.engine.model.model(), "from/file");

    let argv = format!("{with_file} mine --enable-prefix-caching --served-model-name c");
    let args = serve(&argv, &[]).unwrap();
    assert!(args.engine.limits.prefix_caching());
    assert_eq!(args.engine.model.model(), "mine");
    assert_eq!(args.server.served_model_name.unwrap(), ["c"]);

    let args = serve(&format!("{with_file} --model sim"), &[]).unwrap();
    assert_eq!(args.engine.model.model(), args::SIM_MODEL);
    // On one command line neither is later.
    let both = refused("plimsoll serve mine --model sim", &[]);
    assert!(both.contains("[MODEL]") && both.contains("--model"), "{both}");
    let args = serve("plimsoll serve", &[("PLIMSOLL_ENABLE_PREFIX_CACHING", "0")]).unwrap();
    assert!(!args.engine.limits.prefix_caching());
}

#[test]
fn a_later_layer_replaces_a_list_that_flags_add_to() {
    let (_file, with_file) = config("api-key = [\"a\", \"b\"]\n");
    let keys = |argv: &str, environment: &[(&str, &str)]| {
        let args = serve(&format!("{with_file} {argv}"), environment).unwrap();
        let keys = args.server.access.api_key.iter();
        keys.map(|key| key.reveal().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(keys("", &[]), ["a", "b"]);
    let variable = [("PLIMSOLL_API_KEY", "c")];
    assert_eq!(keys("", &variable), ["c"]);
    assert_eq!(keys("--api-key d --api-key e", &variable), ["d", "e"]);
}

#[test]
fn what_is_wrong_is_named() {
    for (text, expected) in [
        ("max-num-seq = 3", "did you mean \"max-num-seqs\""),
        ("port = 99999", "99999"),
        ("port = true", "boolean"),
        ("port = [1, 2]", "array"),
        ("port = { number = 1 }", "table"),
        ("hf-overrides = [1]", "expected an object"),
        (
            "max_num_seqs = 3\nmax-num-seqs = 4",
            ":2: max-num-seqs is set a second time",
        ),
        (
            "disable-ui = true\nno-disable-ui = true",
            ":2: no-disable-ui and disable-ui",
        ),
        ("device-memory = 1\nmax-device-memory = 2", "is set a second time"),
        (
            "device-memory = 1\ngpu-memory-utilization = 0.5",
            ":2: gpu-memory-utilization and device-memory",
        ),
        ("port = 1\n\n# a comment\n\"max-num-seq\" = 3\n", ":4: "),
        ("port = 1\nblock-size = 12\n", ":2: block-size: "),
        ("enable-prefix-caching = 3", "true or false"),
        ("mem-fraction = 1.5", "at most 1.0"),
        ("block-size = 12", "8, 16 or 32"),
        ("config = \"x\"", "another one"),
        ("[server]\nport = 1", "no setting \"server\""),
        ("port = ", "TOML"),
    ] {
        let (file, argv) = config(text);
        let error = refused(&argv, &[]);
        assert!(error.contains(expected), "{text}: {error}");
        assert!(error.contains(file.path().to_str().unwrap()), "{text}: {error}");
    }
    // vLLM's and SGLang's are YAML.
    let yaml = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    std::fs::write(yaml.path(), "model: Qwen/Qwen3-8B\nport: 8000\n").unwrap();
    let error = refused(&format!("plimsoll serve --config {}", yaml.path().display()), &[]);
    assert!(error.contains("no YAML"), "{error}");
    let twice = [
        ("PLIMSOLL_DRAIN_TIMEOUT", "1"),
        ("PLIMSOLL_SHUTDOWN_TIMEOUT", "2"),
    ];
    let no_file = "plimsoll serve --config /no/such.toml";
    for (argv, environment, parts) in [
        (
            "plimsoll serve",
            &twice[..],
            ["PLIMSOLL_DRAIN_TIMEOUT", "second time"],
        ),
        (
            "plimsoll serve",
            &[("PLIMSOLL_PROT", "1")],
            ["PLIMSOLL_PROT", "\"port\""],
        ),
        (no_file, &[], ["--config", "cannot read /no/such.toml"]),
    ] {
        let error = refused(argv, environment);
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[test]
fn what_would_be_right_is_named_too() {
    let error = |variables: &[(&str, &str)]| refused("plimsoll serve", variables);
    let told = error(&[("PLIMSOLL_LOG_FORMAT", "xml")]);
    assert!(
        told.contains("json") && !told.contains("Usage") && !told.contains('\n'),
        "{told}"
    );
    // Kubernetes' variables for a service called plimsoll: the first of them has the name of a flag.
    let links = [
        ("PLIMSOLL_PORT", "tcp://10.0.0.1:8000"),
        ("PLIMSOLL_SERVICE_HOST", "10.0.0.1"),
    ];
    assert!(error(&links).contains("enableServiceLinks: false"));
    assert!(error(&links[1..]).contains("enableServiceLinks: false"));
    assert!(!error(&links[..1]).contains("enableServiceLinks"));
}

#[test]
fn what_is_json_can_be_a_table() {
    let (_file, argv) = config(
        "hf-overrides = { is_matryoshka = true }\n[kv-events-config]\nenable_kv_cache_events = true\ntopic = \"kv\"\n",
    );
    let args = serve(&argv, &[]).unwrap();
    let events = args.events.kv_events_config.unwrap();
    assert!(events.enable_kv_cache_events && events.topic == "kv");
    assert!(args.engine.model.hf_overrides.is_some());
}

#[test]
fn vllms_ways_to_write_values() {
    let words = [
        "plimsoll",
        "serve",
        "--max-model-len=32K",
        "--max-num-batched-tokens",
        "8k",
        "--allowed-origins",
        "[\"https://a\", \"*\"]",
        "https://b",
    ];
    let cli = parse(words.iter().map(OsString::from).collect(), BTreeMap::new()).unwrap();
    let args::Command::Serve(args) = cli.command else {
        panic!("not serve")
    };
    assert_eq!(args.engine.limits.max_model_len, Some(32 << 10));
    assert_eq!(args.engine.limits.max_num_batched_tokens, Some(8000));
    assert_eq!(args.server.allowed_origins(), ["https://a", "*", "https://b"]);
    let error = refused("plimsoll serve --max-model-len -1", &[]);
    assert!(error.contains("leave the flag out"), "{error}");
}

#[test]
fn a_layer_may_hold_what_only_serve_knows() {
    let argv = ["plimsoll", "list", "sim"].iter().map(OsString::from).collect();
    let environment = BTreeMap::from([
        ("PLIMSOLL_PORT".to_owned(), "9".into()),
        ("PLIMSOLL_MAX_NUM_SEQS".to_owned(), "2".into()),
    ]);
    let args::Command::List(args) = parse(argv, environment).unwrap().command else {
        panic!("not list")
    };
    assert_eq!(args.engine.limits.max_num_seqs, Some(2));
}

#[test]
fn a_negative_number_is_a_wrong_value_of_its_flag() {
    for (argv, expected) in [
        ("serve sim --max-num-seqs -1", "of at least 1 is expected"),
        ("serve sim --max-queue -1", "of at least 0 is expected"),
        ("serve sim --port -1", "a number from 0 to 65535 is expected"),
        ("serve sim --seed -1", "of at least 0 is expected"),
        ("serve sim --drain-timeout -1", "a time of at most a year"),
        ("plan sim --mem-fraction -0.5", "above 0 and at most 1.0"),
        ("serve sim --max-model-len -1", "leave the flag out"),
        ("serve sim --max-model-len 1", "at least 2 is expected"),
        ("bench serve --random-prefix-len -1", "of at least 0 is expected"),
        ("selftest --seed -1", "of at least 0 is expected"),
        ("chat --max-tokens -1", "of at least 1 is expected"),
    ] {
        let argv = ["plimsoll"]
            .into_iter()
            .chain(argv.split(' '))
            .map(OsString::from);
        let flag = argv.clone().rev().nth(1).unwrap().into_string().unwrap();
        let error = parse(argv.collect(), BTreeMap::new()).unwrap_err().to_string();
        assert!(error.contains(&flag) && error.contains(expected), "{error}");
        assert!(!error.contains("tip:"), "{error}");
    }
}

#[test]
fn flags_are_taken_with_underscores() {
    let argv = "plimsoll serve --max_model_len=64 --no_enable_prefix_caching --max_num_seqs 3";
    let args = serve(argv, &[]).unwrap();
    assert_eq!(args.engine.limits.max_model_len, Some(64));
    assert_eq!(args.engine.limits.max_num_seqs, Some(3));
    assert!(!args.engine.limits.prefix_caching());
    for ranks in [
        "-tp 2",
        "-tp=2",
        "--tp 2",
        "--tp-size 2",
        "--tensor_parallel_size=2",
    ] {
        let args = serve(&format!("plimsoll serve {ranks}"), &[]).unwrap();
        assert_eq!(args.engine.device.tensor_parallel_size, 2, "{ranks}");
    }
    assert!(refused("plimsoll serve -tp 9", &[]).contains("at most 8"));
    // Python's argparse takes no value that follows at once.
    for unknown in ["-tp2", "-t 2"] {
        assert!(
            serve(&format!("plimsoll serve {unknown}"), &[]).is_err(),
            "{unknown}"
        );
    }
    // Values keep theirs.
    let argv = "plimsoll serve --revision=a_b --served-model-name c_d -- e_f";
    let args = serve(argv, &[]).unwrap();
    assert_eq!(args.engine.model.hub.revision, "a_b");
    assert_eq!(args.engine.model.model(), "e_f");
}

#[test]
fn flags_of_other_servers_are_told_what_to_do_instead() {
    let (_file, with_file) = config("swap_space = 4\n");
    let variable = [("PLIMSOLL_CONTEXT_LENGTH", "8")];
    for (argv, environment, parts) in [
        (
            "plimsoll serve -dp 2 sim",
            &[][..],
            ["-dp: a flag of vLLM", "by --tensor-parallel-size alone"],
        ),
        (
            "plimsoll serve sim --pipeline_parallel_size=2",
            &[],
            [
                "--pipeline-parallel-size: a flag of vLLM and SGLang",
                "by --tensor-parallel-size alone",
            ],
        ),
        (
            "plimsoll serve sim --no-enable-chunked-prefill",
            &[],
            ["always on", "leave"],
        ),
        (
            "plimsoll serve --model-path x --context-length 4",
            &[],
            [
                "--context-length: a flag of SGLang: use --max-model-len",
                "--model-path: ",
            ],
        ),
        (
            "plimsoll profile sim --max_req_total_len 8",
            &[],
            ["--max-req-total-len: ", "use --max-model-len"],
        ),
        (&with_file, &[], [":1: ", "not swapped"]),
        (
            "plimsoll serve",
            &variable,
            ["PLIMSOLL_CONTEXT_LENGTH", "--max-model-len"],
        ),
    ] {
        let error = refused(argv, environment);
        assert!(parts.iter().all(|part| error.contains(part)), "{argv}: {error}");
    }
    // Each is told at once, those too of which nobody knows anything; values and keys of JSON are none.
    let error = refused(
        "plimsoll serve sim -O3 -dpl 2 --nice -1 --kv-events-config.topic=kv --frobnicate x --convert embed -- --x",
        &[],
    );
    let flags = [
        "-O3",
        "-dpl",
        "--nice",
        "--kv-events-config.topic",
        "--frobnicate",
        "--convert",
    ];
    for line in flags.map(|flag| format!("\n  {flag}: ")) {
        assert!(error.contains(&line), "{line}: {error}");
    }
    assert_eq!(error.matches("\n  -").count(), flags.len(), "{error}");
    assert!(error.contains("one JSON document"), "{error}");
    // One device is what there is.
    let error = refused("plimsoll serve sim --pipeline-parallel-size 1", &[]);
    assert!(error.contains("leave the flag out where it says 1"), "{error}");
    // A typo is clap's to explain.
    let typo = serve("plimsoll serve --prot 1", &[]);
    assert!(matches!(typo, Err(Error::Clap(_))));
}

#[test]
fn what_is_advised_exists_and_what_exists_is_no_stranger() {
    for foreign::Stranger {
        flag: name, advice, ..
    } in foreign::all()
    {
        assert!(known(name).is_err(), "--{name} is a flag here");
        let named = advice.split("--").skip(1);
        for flag in named.map(|rest| rest.split([' ', ',', ':', ';']).next().unwrap()) {
            assert!(known(flag).is_ok(), "--{name}: there is no --{flag}");
        }
    }
}

#[test]
fn a_switch_has_an_opposite_and_a_default() {
    let command = <ServeArgs as clap::Args>::augment_args(Command::new("serve"));
    let switches = command
        .get_arguments()
        .filter(|arg| matches!(arg.get_action(), ArgAction::SetTrue));
    let mut pairs = 0;
    for on in switches {
        let name = on.get_long().unwrap();
        if let Ok(off) = known(&format!("no-{name}")) {
            assert!(settings::is_default(on) != settings::is_default(&off), "--{name}");
            pairs += 1;
        } else {
            assert!(
                name.starts_with("no-") && known(&name["no-".len()..]).is_ok(),
                "--{name}"
            );
        }
    }
    assert!(pairs > 4);
}

#[test]
fn settings_say_where_they_come_from() {
    let (file, _) = config("port = 1\nmax-num-seqs = 2\nmax-total-token-num = 64\ndisable_ui = true\n");
    let path = file.path().to_owned();
    let line = |line| Origin::File {
        path: path.clone(),
        line,
    };
    let words = [
        "plimsoll",
        "config",
        "sim",
        "--port=3",
        "--kv-cache-memory-bytes=1GiB",
        "--config",
    ];
    let argv = words.iter().map(OsString::from).chain([path.clone().into()]);
    let environment = BTreeMap::from([
        ("PLIMSOLL_API_KEY".to_owned(), "open-sesame".into()),
        ("PLIMSOLL_NO_PROFILE_CACHE".to_owned(), "yes".into()),
    ]);
    let found = settings(argv.collect(), environment).unwrap();
    let of = |name: &str| {
        let setting = found.iter().find(|setting| setting.name == name);
        let setting = setting.unwrap_or_else(|| panic!("{name}"));
        (setting.value.clone(), setting.origin.clone())
    };
    let variable = |name: &str| Origin::Environment(name.to_owned());
    assert_eq!(of("model"), (Value::Text("sim".into()), Origin::Flag));
    assert_eq!(of("port"), (Value::Whole(3), Origin::Flag));
    assert_eq!(of("max-num-seqs"), (Value::Whole(2), line(2)));
    // What a later layer contradicts is not set any more.
    assert_eq!(of("max-total-token-num"), (Value::Unset, Origin::Default));
    assert_eq!(of("disable-ui"), (Value::Switch(true), line(4)));
    assert_eq!(
        of("profile-cache"),
        (Value::Switch(false), variable("PLIMSOLL_NO_PROFILE_CACHE"))
    );
    assert_eq!(of("api-key"), (Value::Secret, variable("PLIMSOLL_API_KEY")));
    assert_eq!(
        of("enable-prefix-caching"),
        (Value::Switch(true), Origin::Default)
    );
    assert_eq!(of("host"), (Value::Text("127.0.0.1".into()), Origin::Default));
    let names: std::collections::BTreeSet<_> = found.iter().map(|setting| &setting.name).collect();
    assert_eq!(names.len(), found.len(), "each setting once");
    assert!(!format!("{found:?}").contains("sesame"));
}
