"""KV blocks: the pool, the prefix journal and the host tier."""
