"""The least time that work takes on a GPU: every weight read once a step, every product computed once, every key and value
read once a token, at rates that the GPU sustains under that load, and nothing else.

Products and decode attention are counted one after the other, as every server runs them; a product takes the longer of its
reads and its operations. Prompts ride in the steps that decode, so both share one reading of the weights.
"""

# What one H200 sustains, where no rates are given: bytes and bf16 operations a second (tests/bench/h200/rates.json).
BYTES_PER_SECOND = 4.36e12
PRODUCTS_PER_SECOND = 700e12


class Floor:
    """Of one model's shape (config.json) in bf16, in seconds."""

    def __init__(self, config, rates=None):
        rates = rates or {}
        self.read_rate = rates.get("bytes_per_second", BYTES_PER_SECOND)
        self.math_rate = rates.get("products_per_second", PRODUCTS_PER_SECOND)
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        head = config.get("head_dim") or hidden // config["num_attention_heads"]
        queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        # Weights of all layers and of the head.
        self.layers = layers * (2 * hidden * (queries + keys) + 3 * hidden * config["intermediate_size"])
        self.head = hidden * config["vocab_size"]
        # Bytes of one token's keys and values; operations of one query for one key.
        self.kv_bytes = layers * 2 * keys * 2
        self.attention = layers * 4 * queries

    def step(self, rows, sampled):
        """The products of one step of `rows` tokens, of which `sampled` need logits."""
        read = 2 * (self.layers + self.head) / self.read_rate
        return max(read, 2 * (self.layers * rows + self.head * sampled) / self.math_rate)

    def prompt_attention(self, tokens):
        """Attention of one prompt to itself."""
        return self.attention * tokens * tokens / 2 / self.math_rate

    def decode_attention(self, context):
        """One token's reading of `context` keys and values."""
        return context * self.kv_bytes / self.read_rate

    def latency(self, batch, prompt, output):
        """One batch from its prompts to its last token."""
        first = self.step(batch * prompt, batch) + batch * self.prompt_attention(prompt)
        return first + (output - 1) * (self.step(batch, batch) + batch * self.decode_attention(prompt + output / 2))

    def request(self, prompt, output, at_once):
        """Each of many requests, of which `at_once` run at any time."""
        rows = at_once * (prompt + output - 1) / output
        attention = self.prompt_attention(prompt) + (output - 1) * self.decode_attention(prompt + output / 2)
        return output * self.step(rows, at_once) / at_once + attention
