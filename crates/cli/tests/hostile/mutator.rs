//! Disturbs files as an attacker or a broken disk would: in their bytes, and in what they say.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::files::{GGUF, Model};

const NUMBERS: [u64; 12] = [
    0,
    1,
    2,
    7,
    255,
    65_536,
    1_000_000_000,
    i32::MAX as u64,
    u32::MAX as u64,
    1 << 40,
    i64::MAX as u64,
    u64::MAX,
];

const TEXTS: [&str; 12] = [
    "",
    "\u{0}",
    "é▁Ġ",
    "{{",
    "{% set ns = namespace() %}{% set ns.i = ns %}{{ ns.i }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{{ raise_exception('no') }}",
    "(a+)+$",
    "[",
    "../../../../etc/passwd",
    "llama",
];

/// `model` as the case says, and what was done to it.
pub(crate) fn disturb(model: &Model, case: u64) -> (Model, String) {
    let mut rng = StdRng::seed_from_u64(case);
    let mut model = model.clone();
    let names: Vec<_> = model.files.keys().copied().collect();
    let name = *names.choose(&mut rng).unwrap();
    let is_json = name.ends_with(".json");
    let is_safetensors = name.ends_with(".safetensors");
    let times = rng.random_range(1..4);
    let what = match name {
        // Half as their structure, half as bytes.
        _ if is_json && rng.random_bool(0.7) => {
            let mut value = model.json(name);
            let done: Vec<_> = (0..times).map(|_| in_json(&mut value, &mut rng)).collect();
            model.set_json(name, &value);
            done.join("; ")
        }
        _ if is_safetensors && rng.random_bool(0.6) => in_safetensors(&mut model, name, &mut rng),
        _ => {
            let bytes = model.files.get_mut(name).unwrap();
            // Of weights, the header; the end of a GGUF file describes its tensors.
            let most = if is_safetensors { 2000 } else { bytes.len() };
            let done: Vec<_> = (0..times)
                .map(|_| in_bytes(bytes, most, name == GGUF, &mut rng))
                .collect();
            done.join("; ")
        }
    };
    (model, format!("{name}: {what}"))
}

/// Replaces, removes or repeats one value, wherever it is.
fn in_json(value: &mut Value, rng: &mut StdRng) -> String {
    let mut places = Vec::new();
    list(value, String::new(), &mut places);
    // Vocabularies have hundreds of places, and the rest of a file a few: short paths are more interesting.
    let place = (0..3)
        .map(|_| places.choose(rng).unwrap().clone())
        .min_by_key(String::len)
        .unwrap();
    let target = value.pointer_mut(&place).unwrap();
    *target = match (rng.random_range(0..10), std::mem::take(target)) {
        (0, _) => Value::Null,
        (1, _) => (*TEXTS.choose(rng).unwrap()).into(),
        (2, _) => json!(*[-1.0, 1e308, 0.5, -0.0].choose(rng).unwrap()),
        (3, Value::Array(mut items)) if !items.is_empty() => {
            let item = items.choose(rng).unwrap().clone();
            let times = *[1, 2, 1000].choose(rng).unwrap();
            items.extend(std::iter::repeat_n(item, times));
            items.into()
        }
        (4, Value::Object(mut fields)) if !fields.is_empty() => {
            let keys: Vec<_> = fields.keys().cloned().collect();
            let gone = fields.remove(keys.choose(rng).unwrap()).unwrap();
            if rng.random_bool(0.5) {
                fields.insert("unknown".to_owned(), gone);
            }
            fields.into()
        }
        (5, old) => (0..*[1, 20, 100].choose(rng).unwrap()).fold(old, |inner, _| json!([inner])),
        (6, Value::String(text)) => text.repeat(*[2, 10_000].choose(rng).unwrap()).into(),
        (7, _) => json!({}),
        _ => json!(*NUMBERS.choose(rng).unwrap()),
    };
    let mut shown = target.to_string();
    shown.truncate(shown.floor_char_boundary(80));
    format!("{place} = {shown}")
}

/// JSON pointers of all values.
fn list(value: &Value, at: String, places: &mut Vec<String>) {
    match value {
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(index, item)| list(item, format!("{at}/{index}"), places));
        }
        Value::Object(fields) => {
            let escaped = |key: &str| key.replace('~', "~0").replace('/', "~1");
            let fields = fields.iter();
            fields.for_each(|(key, field)| list(field, format!("{at}/{}", escaped(key)), places));
        }
        _ => {}
    }
    places.push(at);
}

/// Disturbs the JSON of the header, and keeps its length true.
fn in_safetensors(model: &mut Model, name: &'static str, rng: &mut StdRng) -> String {
    let bytes = &model.files[name];
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let done = in_json(&mut header, rng);
    let header = serde_json::to_vec(&header).unwrap();
    let mut changed = (header.len() as u64).to_le_bytes().to_vec();
    changed.extend_from_slice(&header);
    changed.extend_from_slice(&bytes[8 + length..]);
    model.files.insert(name, changed);
    done
}

/// Writes a number, cuts, repeats or exchanges bytes within the first `most`.
fn in_bytes(bytes: &mut Vec<u8>, most: usize, ends_matter: bool, rng: &mut StdRng) -> String {
    let most = most.min(bytes.len()).max(1);
    let at = match ends_matter {
        // The first fields and the last tensors.
        true if rng.random_bool(0.4) => rng.random_range(0..most.min(2000)),
        true if rng.random_bool(0.5) => most - 1 - rng.random_range(0..most.min(8000)),
        _ => rng.random_range(0..most),
    };
    let end = |len: usize| (at + len).min(bytes.len());
    match rng.random_range(0..6) {
        0 => {
            bytes.truncate(at);
            format!("cut at {at}")
        }
        1 => {
            let number = *NUMBERS.choose(rng).unwrap();
            let width = *[1, 4, 8].choose(rng).unwrap();
            let place = at..end(width);
            let count = place.len();
            bytes[place].copy_from_slice(&number.to_le_bytes()[..count]);
            format!("{number} in {width} bytes at {at}")
        }
        2 => {
            let gone = at..end(rng.random_range(1..64));
            bytes.drain(gone.clone());
            format!("without {gone:?}")
        }
        3 => {
            let copied = bytes[at..end(rng.random_range(1..256))].to_vec();
            let length = copied.len();
            bytes.splice(at..at, copied);
            format!("{length} bytes twice at {at}")
        }
        _ => {
            let byte = rng.random();
            if let Some(place) = bytes.get_mut(at) {
                *place = byte;
            }
            format!("{byte} at {at}")
        }
    }
}
