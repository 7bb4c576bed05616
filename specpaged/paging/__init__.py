"""Who owns which block of KV (ints only), and the tensors behind the blocks (`kv_cache`: with torch)."""
