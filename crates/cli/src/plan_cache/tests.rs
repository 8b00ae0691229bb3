use std::os::unix::fs::PermissionsExt;

use plimsoll_kernels::cuda::LinearWays;
use plimsoll_model::HfOverrides;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;

/// Stands for a plan: what is read must be what was written.
type Plan = Vec<u64>;

fn key() -> Key {
    let device = DeviceKey {
        name: "GPU".to_owned(),
        cores: 132,
        total: Some(140 << 30),
        granted: Some(140 << 30),
        driver: Some("580.1".to_owned()),
        cuda: Some(13000),
        compute_capability: Some((9, 0)),
        enforce_eager: false,
        threads: None,
    };
    let shape = ShapeKey {
        max_num_batched_tokens: 8192,
        max_num_seqs: 512,
        max_model_len: 4096,
        block_size: 16,
        kv_bytes_per_token: 131_072,
        state_bytes: 0,
        state_slots: 0,
        kv_cache_dtype: "auto".to_owned(),
        dtype: "auto".to_owned(),
        quantization: None,
        pooling: None,
        max_patches: None,
        ranks: 1,
    };
    Key::new(ModelKey::simulated(None), device, shape)
}

fn cache() -> (tempfile::TempDir, PlanCache) {
    let dir = tempfile::tempdir().unwrap();
    let cache = PlanCache::at(dir.path().join("plimsoll/profiles"));
    (dir, cache)
}

fn store(cache: &PlanCache, key: &Key, plan: &Plan) -> PathBuf {
    let stored = cache.store(key, plan, &PhaseSeconds::new());
    stored.unwrap().expect("the cache is on")
}

fn load(cache: &PlanCache, key: &Key) -> Lookup<Plan> {
    cache.load(key).expect("the cache is on")
}

fn hit(lookup: &Lookup<Plan>) -> Option<&Plan> {
    match lookup {
        Lookup::Hit { plan, .. } => Some(plan),
        Lookup::Miss(_) => None,
    }
}

#[test]
fn a_plan_comes_back_for_its_key_and_is_replaced_by_the_next() {
    let (_dir, cache) = cache();
    assert_eq!(load(&cache, &key()), Lookup::Miss(Miss::NoneStored));
    for plan in [vec![1, 2], vec![3]] {
        let path = store(&cache, &key(), &plan);
        assert_eq!(hit(&load(&cache, &key())), Some(&plan));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let dir = path.parent().unwrap();
        assert_eq!(fs::metadata(dir).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(fs::read_dir(dir).unwrap().count(), 1);
    }
    let off = PlanCache::off();
    assert_eq!(off.store(&key(), &vec![1], &PhaseSeconds::new()).unwrap(), None);
    assert_eq!(off.load::<Plan>(&key()), None);
}

/// Changes one part of a key.
type Change<K> = fn(&mut K);

#[test]
fn each_changed_part_of_the_key_is_a_miss_that_names_it() {
    let changes: [(&str, Change<Key>); 22] = [
        ("build.bytes", |k| k.build.bytes = Some(1)),
        ("build.modified", |k| k.build.modified = None),
        ("build.version", |k| k.build.version = "0.0.1".to_owned()),
        ("device.compute_capability", |k| {
            k.device.compute_capability = Some((10, 0));
        }),
        ("device.cores", |k| k.device.cores = 66),
        ("device.cuda", |k| k.device.cuda = Some(12090)),
        ("device.driver", |k| k.device.driver = None),
        ("device.granted", |k| k.device.granted = Some(1)),
        ("device.total", |k| k.device.total = Some(1)),
        ("shape.block_size", |k| k.shape.block_size = 8),
        ("shape.dtype", |k| k.shape.dtype = "bfloat16".to_owned()),
        ("device.enforce_eager", |k| k.device.enforce_eager = true),
        ("shape.kv_bytes_per_token", |k| k.shape.kv_bytes_per_token = 1),
        ("shape.state_bytes", |k| k.shape.state_bytes = 1),
        ("shape.state_slots", |k| k.shape.state_slots = 1),
        ("shape.kv_cache_dtype", |k| {
            k.shape.kv_cache_dtype = "float32".to_owned()
        }),
        ("shape.max_model_len", |k| k.shape.max_model_len = 1),
        ("shape.max_num_batched_tokens", |k| {
            k.shape.max_num_batched_tokens = 1
        }),
        ("shape.max_num_seqs", |k| k.shape.max_num_seqs = 1),
        ("shape.quantization", |k| {
            k.shape.quantization = Some("FP8".to_owned())
        }),
        ("shape.ranks", |k| k.shape.ranks = 2),
        ("device.threads", |k| k.device.threads = Some(2)),
    ];
    let (_dir, cache) = cache();
    store(&cache, &key(), &vec![7]);
    for (part, change) in changes {
        let mut other = key();
        change(&mut other);
        let Lookup::Miss(Miss::Changed(parts)) = load(&cache, &other) else {
            panic!("{part}: not a miss")
        };
        assert_eq!(parts.len(), 1, "{part}: {parts:?}");
        assert!(parts[0].starts_with(part), "{part}: {parts:?}");
    }
    // Another model or device has nothing to be compared with.
    let mut other = key();
    other.device.name = "another".to_owned();
    assert_eq!(load(&cache, &other), Lookup::Miss(Miss::NoneStored));
    assert_eq!(hit(&load(&cache, &key())), Some(&vec![7]));
}

#[test]
fn a_miss_is_compared_with_the_most_similar_plan() {
    let (_dir, cache) = cache();
    let mut far = key();
    (far.shape.max_num_seqs, far.shape.block_size) = (1, 8);
    store(&cache, &far, &vec![1]);
    let mut near = key();
    near.shape.max_num_seqs = 64;
    store(&cache, &near, &vec![2]);
    let Lookup::Miss(miss) = load(&cache, &key()) else {
        panic!("not a miss")
    };
    let expected = "reason=changed parts=\"shape.max_num_seqs (then 64, now 512)\"";
    assert_eq!(miss.to_string(), expected);
}

fn model(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

/// A header of the length it says, and data.
const SAFETENSORS: &str = "\u{2}\0\0\0\0\0\0\0{}data";

#[test]
fn the_model_is_told_by_its_files() {
    let dir = model(&[("config.json", "{}"), ("a.safetensors", SAFETENSORS)]);
    let of = |path: &Path, seed| ModelKey::of_files(path, HfOverrides::default(), seed).unwrap();
    let before = of(dir.path(), None);
    assert_eq!(of(dir.path(), None), before);
    // A tokenizer has no say.
    fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    assert_eq!(of(dir.path(), None), before);

    let weights = dir.path().join("a.safetensors");
    let time = fs::metadata(&weights).unwrap().modified().unwrap();
    let rewrite = |text: &str, time: SystemTime| {
        fs::write(&weights, text).unwrap();
        File::open(&weights).unwrap().set_modified(time).unwrap();
        of(dir.path(), None)
    };
    let later = time + Duration::from_secs(1);
    assert_ne!(rewrite(SAFETENSORS, later), before, "time");
    assert_ne!(rewrite("\u{2}\0\0\0\0\0\0\0{}more data", time), before, "size");
    assert_ne!(rewrite("\u{2}\0\0\0\0\0\0\0[]data", time), before, "head");
    assert_eq!(rewrite(SAFETENSORS, time), before);
    fs::write(dir.path().join("b.safetensors"), SAFETENSORS).unwrap();
    assert_ne!(of(dir.path(), None), before, "one more file");
    fs::remove_file(dir.path().join("b.safetensors")).unwrap();
    fs::write(dir.path().join("config.json"), "[]").unwrap();
    assert_ne!(of(dir.path(), None), before, "config");

    // Random weights are those of the seed, whatever lies there.
    let overrides = serde_json::from_str(r#"{"rope_theta": 5000}"#).unwrap();
    let overridden = ModelKey::of_files(dir.path(), overrides, None).unwrap();
    assert_ne!(overridden, before, "overrides");
    let dummy = of(dir.path(), Some(1));
    assert_ne!(of(dir.path(), Some(2)), dummy);
    fs::remove_file(&weights).unwrap();
    assert_eq!(of(dir.path(), Some(1)), dummy);

    let gguf = model(&[("m.gguf", "GGUF head")]);
    let path = gguf.path().join("m.gguf");
    let before = of(&path, None);
    let time = fs::metadata(&path).unwrap().modified().unwrap();
    fs::write(&path, "GGUF HEAD").unwrap();
    File::open(&path).unwrap().set_modified(time).unwrap();
    assert_ne!(of(&path, None), before, "head");

    for missing in [Path::new("/no/such/model"), dir.path()] {
        fs::remove_file(dir.path().join("config.json")).ok();
        assert!(ModelKey::of_files(missing, HfOverrides::default(), None).is_err());
    }
}

/// What is left of a file after a crash, a full disk or a bad sector is a miss that says so, or the whole plan.
#[test]
fn a_damaged_file_is_a_miss() {
    let (_dir, cache) = cache();
    let plan: Plan = (0..20).collect();
    let path = store(&cache, &key(), &plan);
    let whole = fs::read(&path).unwrap();
    let damaged = |what: &str| match load(&cache, &key()) {
        Lookup::Miss(Miss::Damaged { reason, .. }) => reason,
        other => panic!("{what}: {other:?}"),
    };
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        damaged(&format!("the first {length} bytes"));
    }
    for seed in 0..500 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut bytes = whole.clone();
        let flipped: Vec<usize> = (0..random.random_range(1..4))
            .map(|_| random.random_range(0..bytes.len()))
            .collect();
        for &at in &flipped {
            bytes[at] ^= random.random_range(1..=255u8);
        }
        fs::write(&path, &bytes).unwrap();
        if bytes != whole {
            damaged(&format!("seed {seed}, bytes {flipped:?}"));
        }
    }
    fs::write(&path, &whole).unwrap();
    assert_eq!(hit(&load(&cache, &key())), Some(&plan));

    // A right checksum is not enough.
    let rewrite = |content: &str| {
        let checksum = key::hex(content.as_bytes());
        fs::write(&path, format!("plimsoll-profile 2 {checksum}\n{content}")).unwrap();
    };
    let json = key().to_json();
    for (content, problem) in [
        (
            format!("{{\"key\": {json}, \"plan\": [1], \"more\": 1}}"),
            "unknown field",
        ),
        (format!("{{\"key\": {json}}}"), "missing field"),
        (format!("{{\"key\": {json}, \"plan\": [-1]}}"), "invalid value"),
        ("{\"key\": {}, \"plan\": [1]}".to_owned(), "not that of its name"),
        ("[]".to_owned(), "invalid length"),
    ] {
        rewrite(&content);
        let reason = damaged(&content);
        assert!(reason.contains(problem), "{content}: {reason}");
    }
    let text = String::from_utf8(whole.clone()).unwrap();
    fs::write(&path, text.replacen("profile 2", "profile 1", 1)).unwrap();
    assert!(damaged("version").contains("another format"));
    fs::write(&path, vec![b' '; (1 << 20) + 1]).unwrap();
    assert!(damaged("length").contains("too long"));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    damaged("a directory");

    // The next plan takes the place of what is damaged.
    fs::remove_dir(&path).unwrap();
    fs::write(&path, "").unwrap();
    store(&cache, &key(), &plan);
    assert_eq!(hit(&load(&cache, &key())), Some(&plan));
}

#[test]
fn a_directory_that_cannot_be_written_is_an_error_that_names_it() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let cache = PlanCache::at(file.path().join("profiles"));
    assert!(hit(&load(&cache, &key())).is_none());
    let error = cache.store(&key(), &vec![1], &PhaseSeconds::new());
    let error = error.unwrap_err().to_string();
    assert!(error.contains(file.path().to_str().unwrap()), "{error}");
}

#[test]
fn the_directory_stays_small_and_keeps_what_is_used() {
    let (_dir, cache) = cache();
    let numbered = |n: usize| {
        let mut key = key();
        key.shape.max_num_seqs = n;
        key
    };
    let long_ago = SystemTime::now() - Duration::from_secs(7 * 24 * 3600);
    let mut dir = PathBuf::new();
    for n in 0..MAX_PLANS {
        let path = store(&cache, &numbered(n), &vec![n as u64]);
        let then = long_ago + Duration::from_secs(n as u64);
        File::open(&path).unwrap().set_modified(then).unwrap();
        dir = path.parent().unwrap().to_owned();
    }
    let abandoned = dir.join(format!("{UNFINISHED}dead"));
    fs::write(&abandoned, "").unwrap();
    File::open(&abandoned).unwrap().set_modified(long_ago).unwrap();
    let in_work = dir.join(format!("{UNFINISHED}alive"));
    fs::write(&in_work, "").unwrap();
    // A hit makes the oldest the newest.
    assert_eq!(hit(&load(&cache, &numbered(0))), Some(&vec![0]));
    store(&cache, &numbered(MAX_PLANS), &vec![99]);
    assert_eq!(files(&dir, Key::EXTENSION).len(), MAX_PLANS);
    assert_eq!(hit(&load(&cache, &numbered(0))), Some(&vec![0]));
    assert!(hit(&load(&cache, &numbered(1))).is_none());
    assert!(!abandoned.exists() && in_work.exists());
}

/// Two servers that start at the same moment.
#[test]
fn many_writers_and_readers_see_whole_plans() {
    let (_dir, cache) = cache();
    let plans: Vec<Plan> = (0..4).map(|n| vec![n; 200]).collect();
    store(&cache, &key(), &plans[0]);
    std::thread::scope(|scope| {
        for plan in &plans {
            scope.spawn(|| {
                for _ in 0..50 {
                    store(&cache, &key(), plan);
                    let found = load(&cache, &key());
                    assert!(plans.contains(hit(&found).expect("a plan is always there")));
                }
            });
        }
    });
    let dir = cache.dir.as_ref().unwrap();
    assert_eq!(fs::read_dir(dir).unwrap().count(), 1);
}

#[test]
fn flags_choose_the_directory() {
    let of = |flags: &str| crate::settings::tests::settings(flags).plans;
    assert_eq!(of("--profile-cache-dir /a/b"), PlanCache::at("/a/b"));
    let off = of("--profile-cache-dir /a/b --no-profile-cache");
    assert_eq!(off, PlanCache::off());
    let on_again = of("--no-profile-cache --profile-cache --profile-cache-dir c");
    assert_eq!(on_again, PlanCache::at("c"));
    // Whatever the environment of the tests is, it names a place for caches.
    assert!(of("").dir.is_some_and(|dir| dir.ends_with("plimsoll/profiles")));
}

/// The superuser may read everything, so no file is needed here.
#[test]
fn a_plan_of_another_user_is_not_damaged() {
    let denied = unreadable(PathBuf::from("a.plan"), &ErrorKind::PermissionDenied.into());
    let text = denied.to_string();
    assert!(matches!(denied, Miss::NotAllowed { .. }), "{text}");
    assert!(text.starts_with("reason=not-allowed file=a.plan"), "{text}");
    let other = unreadable(PathBuf::from("a.plan"), &ErrorKind::InvalidData.into());
    assert!(matches!(other, Miss::Damaged { .. }), "{other}");
}

/// What phases took is told of the model's last start, whatever else has changed.
#[test]
fn the_seconds_of_an_earlier_start_are_found_by_the_model_alone() {
    let (dir, cache) = cache();
    assert_eq!(cache.seconds_of(&key().model), None);
    let seconds = PhaseSeconds::from([("weights".to_owned(), 41.5)]);
    cache.store(&key(), &vec![1], &seconds).unwrap();
    assert_eq!(cache.seconds_of(&key().model), Some(seconds));
    assert_eq!(cache.clone().write_only().seconds_of(&key().model), None);
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    let other = ModelKey::of_files(dir.path(), HfOverrides::default(), Some(1)).unwrap();
    assert_eq!(cache.seconds_of(&other), None);
}

fn linear_key() -> LinearKey {
    let Key { model, device, .. } = key();
    LinearKey::new(model, device, "auto".to_owned(), None, 2)
}

/// Of two ranks, as they lie in a file.
fn linear_ways() -> Vec<LinearWays> {
    let rank = |us: f32| {
        serde_json::json!({
            "cublas_lt": 130_100,
            "layers": [{
                "layers": { "n": 4096, "k": 4096, "bias": false, "values": { "Fp8": "Rows" }, "output": "Bf16" },
                "ways": [
                    { "rows": 1, "choice": { "Hopper": 132 }, "us": us },
                    { "rows": 64, "choice": { "Lt": "42 0 1800000001" }, "us": 11.7 },
                ],
            }],
            "chains": [],
            "whole_layers": [],
        })
    };
    let ranks = [10.7, 10.9].map(|us| serde_json::from_value(rank(us)).unwrap());
    ranks.to_vec()
}

#[test]
fn choices_of_linear_layers_hold_for_steps_of_any_shape() {
    let (_dir, cache) = cache();
    let (of, ways) = (linear_key(), linear_ways());
    let look = |key: &LinearKey| cache.load::<Vec<LinearWays>>(key).expect("the cache is on");
    assert_eq!(look(&of), Lookup::Miss(Miss::NoneStored));
    // Neither takes the other's place.
    let plan = store(&cache, &key(), &vec![1]);
    let path = cache.store(&of, &ways, &PhaseSeconds::new()).unwrap().unwrap();
    assert_ne!(path, plan);
    assert_eq!(hit(&load(&cache, &key())), Some(&vec![1]));
    let Lookup::Hit { plan: read, .. } = look(&of) else {
        panic!("not a hit")
    };
    assert_eq!(read, ways);
    assert_eq!(cache.clone().write_only().load::<Vec<LinearWays>>(&of), None);

    let changes: [(&str, Change<LinearKey>); 9] = [
        ("build.bytes", |k| k.build.bytes = Some(1)),
        ("build.modified", |k| k.build.modified = None),
        ("build.version", |k| k.build.version = "0.0.1".to_owned()),
        ("device.cores", |k| k.device.cores = 66),
        ("device.cuda", |k| k.device.cuda = Some(12090)),
        ("device.driver", |k| k.device.driver = None),
        ("dtype", |k| k.dtype = "bfloat16".to_owned()),
        ("quantization", |k| k.quantization = Some("Fp8".to_owned())),
        ("ranks", |k| k.ranks = 1),
    ];
    for (part, change) in changes {
        let mut other = linear_key();
        change(&mut other);
        let Lookup::Miss(Miss::Changed(parts)) = look(&other) else {
            panic!("{part}: not a miss")
        };
        assert_eq!(parts.len(), 1, "{part}: {parts:?}");
        assert!(parts[0].starts_with(part), "{part}: {parts:?}");
    }
    // How much of the device is granted, and whether there are graphs, decides nothing.
    let mut device = key().device;
    (device.granted, device.enforce_eager) = (Some(1), true);
    let elsewhere = LinearKey::new(key().model, device, "auto".to_owned(), None, 2);
    assert!(matches!(look(&elsewhere), Lookup::Hit { .. }));

    // A damaged file is a miss, and so is one of another form with a right checksum.
    let whole = fs::read(&path).unwrap();
    let damaged = |what: &str| match look(&of) {
        Lookup::Miss(Miss::Damaged { reason, .. }) => reason,
        other => panic!("{what}: {other:?}"),
    };
    for at in (0..whole.len()).step_by(7) {
        fs::write(&path, &whole[..at]).unwrap();
        damaged(&format!("the first {at} bytes"));
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        fs::write(&path, &bytes).unwrap();
        damaged(&format!("byte {at}"));
    }
    for (from, to) in [
        ("Hopper", "Volta"),
        ("42 0 1800000001", "42 0 18000000O1"),
        ("130100", "\"13\""),
        ("4096", "-1"),
    ] {
        let text = String::from_utf8(whole.clone()).unwrap();
        let (_, content) = text.split_once('\n').unwrap();
        assert!(content.contains(from), "{from}: {content}");
        let content = content.replace(from, to);
        let checksum = key::hex(content.as_bytes());
        fs::write(&path, format!("plimsoll-profile 2 {checksum}\n{content}")).unwrap();
        damaged(to);
    }
    cache.store(&of, &ways, &PhaseSeconds::new()).unwrap();
    assert!(matches!(look(&of), Lookup::Hit { .. }));
}
