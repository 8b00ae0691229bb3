"""The least time that work takes on a GPU: every weight that a step needs read once, every product computed once, every key and value read
once a token, every recurrent state read and written once a step, at rates that the GPU sustains under that load, and nothing else.

Products, attention and recurrences are counted one after the other, as every server runs them; the products of a step take the longer of all
their reads and all their operations. Prompts ride in the steps that decode, so both share one reading of the weights. Rows go to experts
by chance, each expert as likely as any other, so that few rows read few experts.
"""

import re

# What one H200 sustains, where no rates are given: bytes and bf16 operations a second (tests/bench/h200/rates.json). In 8 bits the same
# units do twice as many.
BYTES_PER_SECOND = 4.36e12
PRODUCTS_PER_SECOND = 700e12
BF16, F32 = 2, 4


class Formats:
    """How matrices are stored: as `quantization_config` says, or in FP8 made at the start (`--quantization fp8`), and otherwise in bf16."""

    def __init__(self, config, flags=()):
        stored = config.get("quantization_config")
        self.only_experts = False
        self.ignored = []
        # Operations at twice the rate are those of inputs in 8 bits; other formats are turned into bf16.
        self.in_8_bits = False
        if stored is None and "fp8" in following(flags, "--quantization"):
            # A scale for each output.
            self.of_scales = lambda outputs, inputs: F32 * outputs
            self.bits, self.in_8_bits, self.ignored = 8, True, ["lm_head"]
        elif stored is None:
            self.bits = None
        elif stored["quant_method"] == "fp8":
            rows, columns = stored["weight_block_size"]
            self.of_scales = lambda outputs, inputs: F32 * -(-outputs // rows) * -(-inputs // columns)
            self.bits, self.in_8_bits, self.ignored = 8, True, ["lm_head", *stored["modules_to_not_convert"]]
        elif stored["quant_method"] == "mxfp4":
            self.of_scales = lambda outputs, inputs: outputs * inputs / 32
            self.bits, self.only_experts, self.ignored = 4, True, stored["modules_to_not_convert"]
        elif stored["quant_method"] == "compressed-tensors":
            (group,) = stored["config_groups"].values()
            weights = group["weights"]
            assert weights["type"] == "int" and weights["symmetric"], weights
            self.of_scales = lambda outputs, inputs: BF16 * outputs * inputs / weights["group_size"]
            self.bits, self.ignored = weights["num_bits"], stored["ignore"]
        else:
            raise ValueError(f"no floor of weights in {stored['quant_method']}")

    def is_plain(self, module):
        """Whether the matrix of this name stays in bf16. A name stands for all that is inside, * for anything."""
        if self.bits is None or self.only_experts and ".experts." not in module:
            return True
        for name in self.ignored:
            inside = re.escape(name).replace(r"\*", ".*")
            if re.match(name[3:] if name.startswith("re:") else rf"(.*\.)?{inside}(\..*)?$", module):
                return True
        return False

    def bytes(self, module, outputs, inputs):
        if self.is_plain(module):
            return BF16 * outputs * inputs
        return outputs * inputs * self.bits / 8 + self.of_scales(outputs, inputs)

    def pace(self, module):
        """Operations in the time of one in bf16."""
        return 1 if self.is_plain(module) or not self.in_8_bits else 2


def following(flags, name):
    """The values of a flag."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    return [value for flag, value in zip(words, words[1:]) if flag == name]


def pick(config, *names, default=None):
    """The first field that there is."""
    return next((config[name] for name in names if config.get(name) is not None), default)


class Floor:
    """Of one model's shape (config.json) under these engine arguments, in seconds."""

    def __init__(self, config, rates=None, flags=()):
        rates = rates or {}
        self.read_rate = rates.get("bytes_per_second", BYTES_PER_SECOND)
        self.math_rate = rates.get("products_per_second", PRODUCTS_PER_SECOND)
        self.formats = Formats(config, flags)
        self.kv_element = 1 if any(kind.startswith("fp8") for kind in following(flags, "--kv-cache-dtype")) else BF16
        self.inside = "model.language_model" if "text_config" in config else "model"
        text = config.get("text_config", config)
        self.hidden = text["hidden_size"]
        # Bytes that every step reads; operations for each row.
        self.weight_bytes, self.operations = 0, 0
        # Experts of a layer, and those of a row; bytes of one expert in each layer.
        self.experts = pick(text, "num_experts", "num_local_experts", default=0)
        self.top = pick(text, "num_experts_per_tok", "top_k_experts", default=0)
        self.expert_bytes = 0
        # Of each layer with attention: bytes of one token's keys and values, operations of one query for one key, the window.
        self.attention = []
        # Of all layers with states: bytes of a request; operations for each token.
        self.state_bytes, self.state_operations = 0, 0
        for layer in range(text["num_hidden_layers"]):
            self.add_layer(text, layer)
        head = ("lm_head", text["vocab_size"], self.hidden)
        self.head_bytes = self.formats.bytes(*head)
        self.head_operations = 2 * text["vocab_size"] * self.hidden / self.formats.pace("lm_head")

    def add(self, module, outputs, inputs, times=1):
        """A matrix that every step reads; `times` in a row of experts."""
        self.operations += times * 2 * outputs * inputs / self.formats.pace(module)
        return self.formats.bytes(module, outputs, inputs)

    def add_layer(self, text, layer):
        name = f"{self.inside}.layers.{layer}"
        kind = text["layer_types"][layer] if text.get("layer_types") else "full_attention"
        if kind == "linear_attention":
            self.add_states(text, f"{name}.linear_attn")
        else:
            self.add_attention(text, f"{name}.self_attn", kind)
        is_sparse = (layer + 1) % text.get("decoder_sparse_step", 1) == 0 and layer not in text.get("mlp_only_layers", [])
        if self.experts and is_sparse:
            self.add_experts(text, name)
        # Gemma 4 has both in each layer.
        if not (self.experts and is_sparse) or text.get("enable_moe_block"):
            self.weight_bytes += self.mlp(f"{name}.mlp", text["intermediate_size"])

    def mlp(self, name, width, times=1):
        """Bytes of gate, up and down."""
        wide = sum(self.add(f"{name}.{part}_proj", width, self.hidden, times) for part in ("gate", "up"))
        return wide + self.add(f"{name}.down_proj", self.hidden, width, times)

    def add_experts(self, text, name):
        width = pick(text, "moe_intermediate_size", "intermediate_size")
        self.weight_bytes += self.add(f"{name}.mlp.gate", self.experts, self.hidden)
        self.expert_bytes += self.mlp(f"{name}.mlp.experts.0", width, self.top)
        if shared := text.get("shared_expert_intermediate_size"):
            self.weight_bytes += self.mlp(f"{name}.mlp.shared_expert", shared)
            self.weight_bytes += self.add(f"{name}.mlp.shared_expert_gate", 1, self.hidden)

    def add_attention(self, text, name, kind):
        heads, head = text["num_attention_heads"], text.get("head_dim") or self.hidden // text["num_attention_heads"]
        keys = text["num_key_value_heads"]
        if kind == "full_attention":
            head, keys = pick(text, "global_head_dim", default=head), pick(text, "num_global_key_value_heads", default=keys)
        # Keys may be values too, and queries may have gates.
        is_both = kind == "full_attention" and text.get("attention_k_eq_v", False)
        gated = 2 if text.get("attn_output_gate") else 1
        for part, outputs in ("q", gated * heads * head), ("k", keys * head), *([] if is_both else [("v", keys * head)]):
            self.weight_bytes += self.add(f"{name}.{part}_proj", outputs, self.hidden)
        self.weight_bytes += self.add(f"{name}.o_proj", self.hidden, heads * head)
        window = text["sliding_window"] if kind == "sliding_attention" else None
        self.attention.append((2 * keys * head * self.kv_element, 4 * heads * head, window))

    def add_states(self, text, name):
        """Gated DeltaNet: a state of [keys, values] for each head, and the last inputs of the convolution."""
        heads, key, value = text["linear_num_value_heads"], text["linear_key_head_dim"], text["linear_value_head_dim"]
        values = heads * value
        channels = 2 * text["linear_num_key_heads"] * key + values
        for part, outputs in ("in_proj_qkv", channels), ("in_proj_z", values), ("in_proj_b", heads), ("in_proj_a", heads):
            self.weight_bytes += self.add(f"{name}.{part}", outputs, self.hidden)
        self.weight_bytes += self.add(f"{name}.out_proj", self.hidden, values)
        taps = text["linear_conv_kernel_dim"]
        self.weight_bytes += BF16 * channels * taps
        self.state_bytes += F32 * (heads * key * value + channels * (taps - 1))
        # What the state knows of k, what is written for it, what it says of q.
        self.state_operations += 3 * 2 * heads * key * value

    def kv_bytes(self, context):
        """Bytes of the keys and values that one more token sees behind `context` others."""
        return sum(each * min(context, window or context) for each, _, window in self.attention)

    def distinct(self, rows):
        """Experts of a layer to which at least one of `rows` goes, on average."""
        return self.experts * (1 - (1 - self.top / self.experts) ** rows) if self.experts else 0

    def step(self, rows, sampled):
        """The products of one step of `rows` tokens, of which `sampled` need logits."""
        read = self.weight_bytes + self.distinct(rows) * self.expert_bytes + self.head_bytes
        return max(read / self.read_rate, (self.operations * rows + self.head_operations * sampled) / self.math_rate)

    def prompt_attention(self, tokens):
        """Attention of one prompt to itself, and its states, which are written once."""
        pairs = 0
        for _, operations, window in self.attention:
            seen = min(tokens, window or tokens)
            pairs += operations * (seen * tokens - seen * seen / 2)
        return (pairs + self.state_operations * tokens) / self.math_rate + self.state_bytes / self.read_rate

    def decode_attention(self, context):
        """One token's reading of `context` keys and values, and of its states, which it writes again."""
        return (self.kv_bytes(context) + 2 * self.state_bytes) / self.read_rate

    def decode(self, batch, context):
        """One step in which each request of a batch generates a token behind `context` others."""
        return self.step(batch, batch) + batch * self.decode_attention(context)

    def latency(self, batch, prompt, output):
        """One batch from its prompts to its last token."""
        first = self.step(batch * prompt, batch) + batch * self.prompt_attention(prompt)
        return first + (output - 1) * self.decode(batch, prompt + output / 2)

    def request(self, prompt, output, at_once):
        """Each of many requests, of which `at_once` run at any time."""
        rows = at_once * (prompt + output - 1) / output
        attention = self.prompt_attention(prompt) + (output - 1) * self.decode_attention(prompt + output / 2)
        return output * self.step(rows, at_once) / at_once + attention
