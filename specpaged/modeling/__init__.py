"""HF models on paged KV: loading, the attention hook, the model runner, exact numerics."""
