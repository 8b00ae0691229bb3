use super::{MetaValue, Source};
use crate::TextError;
use plimsoll_core::untrusted::quotable;

/// How a byte-level BPE cuts a text into words before merging.
pub(super) struct PreTokenizer {
    /// Applied one after the other; matches and what is between them become pieces.
    pub(super) patterns: &'static [&'static str],
    /// A word that is a token is that token, whatever the merges say.
    pub(super) ignore_merges: bool,
    /// A text begins with BOS unless the file says otherwise.
    pub(super) add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: [&str; 3] = [
    r"\p{N}{1,3}",
    r"[一-龥\x{3040}-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];
/// DeepSeek's list of letters: no `\p{L}`, as its `tokenizer.json` has it.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const DEEPSEEK_PUNCTUATION: &str = r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+";
const DEEPSEEK_CJK: &str = r"[一-龥ࠀ-一가-\x{D7FF}]+";
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

/// By `tokenizer.ggml.pre`.
pub(super) fn load(source: &Source<'_>) -> Result<PreTokenizer, TextError> {
    const KEY: &str = "tokenizer.ggml.pre";
    let name = source.metadata.get(KEY).and_then(MetaValue::as_str);
    let name = name.ok_or_else(|| {
        TextError::invalid(
            KEY,
            "missing: this GGUF file is too old to name its pre-tokenizer; convert the model again",
        )
    })?;
    let plain = |patterns| PreTokenizer {
        patterns,
        ignore_merges: false,
        add_bos: false,
    };
    let whole_words = |patterns| PreTokenizer {
        patterns,
        ignore_merges: true,
        add_bos: false,
    };
    Ok(match name {
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2"
        | "jina-v5-nano" => PreTokenizer {
            add_bos: true,
            ..whole_words(&[LLAMA3])
        },
        "tekken" => PreTokenizer {
            add_bos: true,
            ..whole_words(&[TEKKEN])
        },
        "glm4" | "glm5" => whole_words(&[LLAMA3]),
        "dbrx" | "smaug-bpe" | "chatglm-bpe" => plain(&[LLAMA3]),
        "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "stablelm2" | "hunyuan"
        | "solar-open" | "grok-2" => plain(&[QWEN2]),
        "qwen35" => plain(&[QWEN35]),
        "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" => plain(&[GPT4O]),
        "tiny_aya" | "cohere2moe" => plain(&[r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O]),
        "gpt-2" | "phi-2" | "jina-es" | "jina-de" | "gigachat" | "jina-v2-es" | "jina-v2-de" | "a.x-4.0"
        | "mellum" | "modern-bert" | "jina-v1-en" | "jina-v2-code" | "roberta-bpe" | "mpt" | "olmo"
        | "jais" | "trillion" | "granite-docling" | "exaone4" => plain(&[GPT2]),
        "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone" | "minerva-7b"
        | "mellum2" => plain(&[r"\p{N}", GPT2]),
        "falcon" => plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"]),
        "deepseek-llm" => plain(&[
            r"[\r\n]",
            DEEPSEEK_LETTERS,
            DEEPSEEK_PUNCTUATION,
            r"\s+$",
            DEEPSEEK_CJK,
            r"\p{N}+",
        ]),
        "deepseek-coder" => plain(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}"]),
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => plain(&DEEPSEEK3),
        "poro-chat" | "bloom" | "gpt3-finnish" => plain(&[BLOOM]),
        "viking" => plain(&[BLOOM, r"\p{N}"]),
        "default" => plain(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]),
        _ => {
            let supported = "llama-bpe, tekken, qwen2, qwen35, smollm, gpt-2, gpt-4o, llama4, deepseek-llm, \
                             deepseek-coder, deepseek-v3, falcon, falcon3, starcoder, refact, command-r, mpt, olmo, \
                             glm4, chatglm-bpe, stablelm2, exaone, exaone4, hunyuan, bloom, viking, default and others \
                             alike";
            return Err(TextError::Unsupported {
                place: KEY.to_owned(),
                what: "pre-tokenizer",
                found: quotable(name),
                supported: supported.to_owned(),
            });
        }
    })
}
