"""Directories of models without weights, for `--load-format dummy`."""

import itertools
import json

# Shape of meta-llama/Llama-3.1-8B: facts from its config.json, as in all that follow.
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

# Shape of Qwen/Qwen2.5-0.5B-Instruct.
QWEN_2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

# Shape of Qwen/Qwen2.5-1.5B and Qwen/Qwen2.5-Coder-1.5B.
QWEN_2_5_1_5B = QWEN_2_5_0_5B | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}

# Shapes that scripts/random-gguf writes, with llama.cpp's name of the family.
GGUF_SHAPES = {"qwen2.5-1.5b": ("qwen2", QWEN_2_5_1_5B)}

# Shape of Qwen/Qwen3-32B.
QWEN_3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def write_model(directory, config):
    """Config, generation defaults and a tokenizer whose every token is a word, so that both sides turn tokens into text."""
    text = config.get("text_config", config)
    end = text["eos_token_id"]
    vocabulary = {f"w{token}": token for token in range(text["vocab_size"])}
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
             "vision_end_token_id": "<|vision_end|>"}
    special = {"<|end|>": end} | {name: config[field] for field, name in names.items() if field in config}
    for name, token in special.items():
        del vocabulary[f"w{token}"]
        vocabulary[name] = token
    added = [{"content": name, "id": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
             for name, token in special.items()]
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                 "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
                 "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}}
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": text.get("bos_token_id"), "eos_token_id": end},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>",
                                  "model_max_length": text["max_position_embeddings"]},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))


def write_words(directory, config, more_special=None):
    """The model's files with a vocabulary such as real ones: bytes, JSON's punctuation, and pronounceable words with and without
    a space before them. Text is cut into bytes: that is for the server, which masks tokens by what they say. Special tokens are the first and
    the last of texts, and `more_special`, with their numbers."""
    write_model(directory, config)
    # GPT-2's printable stand-ins for bytes.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    symbol = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}
    written = ['{"', '"}', '":', '": "', '", "', '",', '"}, {"', '],', '[', ']}', '{\n', '},\n', '  ', '    ', '": ', ', "', '"]', '": [', '": {']
    digits = [str(number) for number in range(1000)]
    consonants, vowels = "bcdfghjklmnpqrstvwxz", "aeiouy"
    syllables = [c + v for c in consonants for v in vowels] + [c + v + e for c in consonants for v in vowels for e in "nrst"]
    words = itertools.chain.from_iterable(map("".join, itertools.product(syllables, repeat=n)) for n in (1, 2, 3))
    spaced = itertools.chain.from_iterable((word, " " + word, word.capitalize()) for word in words)
    special = {"<|begin|>": config["bos_token_id"], "<|end|>": config["eos_token_id"]} | (more_special or {})
    room = config["vocab_size"] - 256 - len(special)
    texts = dict.fromkeys(itertools.islice(itertools.chain(written, digits, spaced), 2 * room))
    texts = [text for text in texts if len(text) > 1][:room]
    tokens = [symbol[byte] for byte in range(256)] + ["".join(symbol[byte] for byte in text.encode()) for text in texts]
    free = (token for token in range(config["vocab_size"]) if token not in special.values())
    vocabulary = dict(zip(tokens, free)) | special
    added = [{"content": text, "id": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for text, token in special.items()]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                 "pre_tokenizer": level, "post_processor": None, "decoder": level,
                 "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
