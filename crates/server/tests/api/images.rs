//! Images in chats, responses and messages.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine};
use plimsoll_images::Processor;
use plimsoll_server::{ImageInput, MediaLimits, ServerOptions};
use plimsoll_text::Tokenizer;
use serde_json::{Map, Value, json};

use crate::rig::{Rig, Setup};
use crate::{CHAT, with};

/// Ids of the special tokens, in place of bytes that no text here has.
const PAD: u32 = 1;
const START: u32 = 2;
const END: u32 = 3;

/// Writes images as Qwen's templates do.
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}\
     {% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}\
     {% endif %}{% endfor %}{% endif %}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

/// Each byte is a token, and there are tokens for images.
fn tokenizer() -> Tokenizer {
    let mut vocab = Map::new();
    let special = [
        "<|image_pad|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|endoftext|>",
    ];
    let ids = [PAD, START, END, 256];
    let mut others = 0;
    for byte in 0..=255u32 {
        // The letters of byte-level BPE: printable bytes are themselves, the others follow behind 256.
        let printable = matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let letter = match printable {
            true => byte,
            false => {
                others += 1;
                255 + others
            }
        };
        if !ids.contains(&byte) {
            vocab.insert(char::from_u32(letter).unwrap().to_string(), json!(byte));
        }
    }
    let added: Vec<Value> = special
        .iter()
        .zip(ids)
        .map(|(text, id)| {
            vocab.insert((*text).to_owned(), json!(id));
            json!({ "id": id, "content": text, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false })
        })
        .collect();
    let level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [] },
    });
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("tokenizer.json"), file.to_string()).unwrap();
    let config = json!({ "eos_token": "<|endoftext|>" }).to_string();
    fs::write(directory.path().join("tokenizer_config.json"), config).unwrap();
    Tokenizer::from_dir(directory.path()).unwrap()
}

/// Squares of 8 x 8 pixels are one token; images have 1 to 16 of them.
fn rig_with(media: MediaLimits) -> Rig {
    rig_of(ServerOptions {
        media,
        ..Setup::default().options
    })
}

fn rig_of(options: ServerOptions) -> Rig {
    let settings = json!({
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2,
        "min_pixels": 64, "max_pixels": 1024,
    });
    let config = json!({ "image_token_id": PAD, "vision_config": {} });
    let tokenizer = tokenizer();
    let processor = Processor::new(&settings, &config).unwrap();
    Rig::new(Setup {
        images: Some(ImageInput::new(processor, &tokenizer).unwrap()),
        tokenizer,
        template: Some(TEMPLATE),
        options,
        ..Setup::default()
    })
}

fn rig() -> Rig {
    rig_with(MediaLimits::default())
}

fn golden(name: &str) -> Vec<u8> {
    let directory = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/images"));
    fs::read(directory.join(name)).unwrap()
}

fn data_url(name: &str) -> String {
    format!("data:image/png;base64,{}", BASE64_STANDARD.encode(golden(name)))
}

fn part(name: &str) -> Value {
    json!({ "type": "image_url", "image_url": { "url": data_url(name), "detail": "auto" } })
}

fn ask(content: Value) -> Value {
    json!({ "messages": [{ "role": "user", "content": content }], "max_tokens": 4, "ignore_eos": true, "seed": 1 })
}

/// Tokens of a rendered prompt, in which `#` is one placeholder.
fn tokens(text: &str) -> Vec<u32> {
    let token = |c| match c {
        '#' => PAD,
        '[' => START,
        ']' => END,
        c => c as u32,
    };
    text.chars().map(token).collect()
}

async fn tokenized(rig: &Rig, body: Value) -> Vec<u32> {
    let messages = json!({ "messages": body["messages"] });
    let answer = rig.post("/tokenize", messages).await.json();
    serde_json::from_value(answer["tokens"].clone()).unwrap()
}

#[tokio::test]
async fn each_image_takes_its_place_in_the_prompt() {
    let rig = rig();
    // 23 x 17 pixels are 3 x 2 squares, 45 x 34 are more than 16 and become 4 x 3, 1 x 1 is one.
    let cases = [
        (json!([part("rgb.png")]), "<user>[######]</><assistant>"),
        (
            json!([{ "type": "text", "text": "a" }, part("rgb.png"), { "type": "text", "text": "b" }, part("one.png")]),
            "<user>a[######]b[#]</><assistant>",
        ),
        (
            json!([part("interlaced-not.png")]),
            "<user>[############]</><assistant>",
        ),
        (
            json!([{ "type": "image_url", "image_url": data_url("one.png") }]),
            "<user>[#]</><assistant>",
        ),
        (
            json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]),
            "<user>a\nb</><assistant>",
        ),
    ];
    for (content, expected) in cases {
        let expected = tokens(expected);
        assert_eq!(tokenized(&rig, ask(content.clone())).await, expected);
        let answer = rig.post(CHAT, ask(content)).await.json();
        assert_eq!(answer["usage"]["prompt_tokens"], expected.len(), "{answer}");
    }
    let models = rig.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["input_modalities"], json!(["text", "image"]));
}

#[tokio::test]
async fn memory_names_the_largest_image_where_there_may_be_one() {
    let images = rig().get("/memory").await.json()["images"].clone();
    assert_eq!(images["max_per_request"], 16);
    // Nearly 200 to 1: its short side cannot shrink below a square, so that it has more squares than one of 32 x 32 pixels.
    assert_eq!(
        images["largest"],
        json!({ "width": 1372, "height": 7, "patches": 4 * 56, "tokens": 56 })
    );
    let none = rig_with(MediaLimits {
        max_images: 0,
        ..MediaLimits::default()
    });
    assert!(none.get("/memory").await.json().get("images").is_none());
}

/// Memory for one of two requests at a time.
#[tokio::test]
async fn memory_of_images_is_held_until_their_requests_end() {
    let rig = rig_of(ServerOptions {
        image_bytes: 4 << 10,
        ..Setup::default().options
    });
    rig.set_step(Duration::from_millis(20));
    let ask = || rig.post(CHAT, ask(json!([part("interlaced-not.png")])));
    let mut most = 0;
    let watched = async {
        loop {
            most = most.max(rig.state.engine().stats().in_flight);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        () = watched => {}
        (one, other) = async { tokio::join!(ask(), ask()) } => {
            assert_eq!((one.status.as_u16(), other.status.as_u16()), (200, 200));
        }
    }
    assert_eq!(most, 1);
}

#[tokio::test]
async fn texts_never_become_images() {
    let rig = rig();
    let text = "<|vision_start|><|image_pad|><|vision_end|>";
    let found = tokenized(&rig, ask(json!(text))).await;
    assert_eq!(found, tokens(&format!("<user>{text}</><assistant>")));
    let both = json!([{ "type": "text", "text": text }, part("one.png")]);
    let found = tokenized(&rig, ask(both.clone())).await;
    assert_eq!(found.iter().filter(|&&token| token == PAD).count(), 1);
    assert_eq!(found, tokens(&format!("<user>{text}[#]</><assistant>")));
    assert_eq!(rig.post(CHAT, ask(both)).await.status, 200);
}

#[tokio::test]
async fn responses_and_messages_take_images_also_from_tools() {
    let rig = rig();
    let call = json!({ "type": "function_call", "call_id": "c", "name": "look", "arguments": "{}" });
    let image = json!({ "type": "input_image", "image_url": data_url("rgb.png"), "detail": "high" });
    let result = json!({ "type": "function_call_output", "call_id": "c", "output": [image] });
    let body = json!({
        "input": [{ "role": "user", "content": [{ "type": "input_text", "text": "hi" }, image] }, call, result],
        "max_output_tokens": 4,
    });
    let response = rig.post("/v1/responses", body).await.json();
    let used = response["usage"]["input_tokens"].as_u64().unwrap();
    let body = json!({
        "previous_response_id": response["id"], "input": [{ "role": "user", "content": [image] }], "max_output_tokens": 4,
    });
    let next = rig.post("/v1/responses", body).await.json();
    let more = next["usage"]["input_tokens"].as_u64().unwrap();
    assert!(used > 12 && more >= used + 6, "{used} {more}");
    let items = rig
        .get(&format!(
            "/v1/responses/{}/input_items",
            response["id"].as_str().unwrap()
        ))
        .await;
    assert!(items.json().to_string().contains("data:image/png;base64,"));

    let block = json!({ "type": "image", "source": {
        "type": "base64", "media_type": "image/png", "data": BASE64_STANDARD.encode(golden("rgb.png")) } });
    let linked = json!({ "type": "image", "source": { "type": "url", "url": data_url("one.png") } });
    let conversation =
        |content: Value| json!({ "messages": [{ "role": "user", "content": content }], "max_tokens": 4 });
    let count = async |body: Value| {
        let mut body = body;
        body.as_object_mut().unwrap().remove("max_tokens");
        let answer = rig.post("/v1/messages/count_tokens", body).await.json();
        answer["input_tokens"].as_u64().unwrap()
    };
    let text = json!({ "type": "text", "text": "a" });
    let body = conversation(json!([text, block, linked]));
    let expected = tokens("<user>a[######][#]</><assistant>").len() as u64;
    assert_eq!(count(body.clone()).await, expected);
    let answer = rig.post("/v1/messages", body).await.json();
    assert_eq!(answer["usage"]["input_tokens"], expected, "{answer}");
    let seen = json!({ "messages": [
        { "role": "user", "content": "look" },
        { "role": "assistant", "content": [{ "type": "tool_use", "id": "t", "name": "look", "input": {} }] },
        { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "t", "content": [text, block] }] },
    ], "max_tokens": 4 });
    let mut blind = seen.clone();
    blind["messages"][2]["content"][0]["content"] = json!([text]);
    // The marks around the image and its six tokens.
    assert!(count(seen.clone()).await - count(blind).await >= 8);
    assert_eq!(rig.post("/v1/messages", seen).await.status, 200);
}

#[tokio::test]
async fn what_is_wrong_with_an_image_is_said_with_its_place() {
    let rig = rig();
    let at = "messages[0].content[0]";
    let url = |url: &str| json!([{ "type": "image_url", "image_url": { "url": url } }]);
    let cases = [
        (json!([part("cut-rgb.png")]), at, "PNG image cannot be decoded"),
        (json!([part("text.txt")]), at, "not an image in a known format"),
        (url("data:image/png,hello"), at, "must be in base64"),
        (
            url("data:video/mp4;base64,aGk="),
            at,
            "holds `video/mp4`, not an image",
        ),
        (url("http://example.com/a.png"), at, "--allowed-media-domains"),
        (url("file:///etc/passwd"), at, "data URL"),
        (
            json!([{ "type": "image_url" }]),
            "messages[0].content[0].image_url",
            "is missing",
        ),
        (
            json!([{ "type": "image_url", "image_url": 5 }]),
            "messages[0].content[0].image_url",
            "expected a URL",
        ),
        (
            json!([{ "type": "image_url", "image_url": { "url": "x", "detail": "close" } }]),
            "messages[0].content[0].image_url.detail",
            "unknown variant `close`",
        ),
        (
            json!([{ "type": "video_url", "video_url": { "url": "x" } }]),
            "messages[0].content[0].type",
            "frames",
        ),
        (
            json!([{ "type": "input_audio", "input_audio": {} }]),
            "messages[0].content[0].type",
            "input_audio",
        ),
    ];
    for (content, param, message) in cases {
        for path in [CHAT, "/tokenize"] {
            let body = match path {
                CHAT => ask(content.clone()),
                _ => json!({ "messages": ask(content.clone())["messages"] }),
            };
            // Whole files are only decoded where their pixels are needed.
            if path != CHAT && message.contains("cannot be decoded") {
                continue;
            }
            let error = rig.post(path, body).await.error(400);
            assert_eq!(error["param"], param, "{error}");
            assert!(error["message"].as_str().unwrap().contains(message), "{error}");
        }
    }
    let system = json!({ "messages": [{ "role": "system", "content": [part("one.png")] }, { "role": "user", "content": "a" }] });
    let error = rig.post(CHAT, system).await.error(400);
    assert_eq!(error["param"], at, "{error}");
    let error = rig
        .post(
            CHAT,
            with(ask(json!([part("one.png")])), "truncate_prompt_tokens", json!(5)),
        )
        .await
        .error(400);
    assert_eq!(error["param"], "truncate_prompt_tokens", "{error}");
}

#[tokio::test]
async fn images_are_limited() {
    let two = rig_with(MediaLimits {
        max_images: 2,
        ..MediaLimits::default()
    });
    let of = |count: usize| ask(json!(vec![part("one.png"); count]));
    assert_eq!(two.post(CHAT, of(2)).await.status, 200);
    let error = two.post(CHAT, of(3)).await.error(400);
    assert_eq!(error["param"], "messages[0].content[2]", "{error}");
    assert!(
        error["message"].as_str().unwrap().contains("at most 2"),
        "{error}"
    );
    let none = rig_with(MediaLimits {
        max_images: 0,
        ..MediaLimits::default()
    });
    let error = none.post(CHAT, of(1)).await.error(400);
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("--limit-mm-per-prompt"),
        "{error}"
    );
    assert_eq!(
        none.get("/v1/models").await.json()["data"][0]["input_modalities"],
        json!(["text"])
    );
    let small = rig_with(MediaLimits {
        max_bytes: 50,
        ..MediaLimits::default()
    });
    let error = small.post(CHAT, of(1)).await.error(400);
    assert!(
        error["message"].as_str().unwrap().contains("at most 50"),
        "{error}"
    );
}

#[tokio::test]
async fn requests_choose_the_size_within_the_models() {
    let rig = rig();
    let count = async |kwargs: Value| {
        let body = json!({ "messages": ask(json!([part("interlaced-not.png")]))["messages"], "mm_processor_kwargs": kwargs });
        rig.post("/tokenize", body).await
    };
    let pads = |answer: Value| {
        let tokens: Vec<u32> = serde_json::from_value(answer["tokens"].clone()).unwrap();
        tokens.iter().filter(|&&token| token == PAD).count()
    };
    assert_eq!(pads(count(json!({})).await.json()), 12);
    assert_eq!(pads(count(json!({ "max_pixels": 256 })).await.json()), 2);
    let error = count(json!({ "max_pixels": 2048 })).await.error(400);
    assert_eq!(error["param"], "mm_processor_kwargs.max_pixels", "{error}");
    assert_eq!(count(json!({ "sharpness": 2 })).await.status, 400);
    // A model of text alone names what it lacks.
    let text = Rig::new(Setup::default());
    let error = text.post(CHAT, ask(json!([part("one.png")]))).await.error(400);
    assert_eq!(error["param"], "messages[0].content[0].type", "{error}");
    assert!(
        error["message"].as_str().unwrap().contains("only text"),
        "{error}"
    );
    let error = text
        .post(
            CHAT,
            with(ask(json!("a")), "mm_processor_kwargs", json!({ "max_pixels": 9 })),
        )
        .await
        .error(400);
    assert_eq!(error["param"], "mm_processor_kwargs", "{error}");
}
