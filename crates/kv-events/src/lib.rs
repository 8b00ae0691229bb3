//! KV cache events in the wire format of vLLM.
