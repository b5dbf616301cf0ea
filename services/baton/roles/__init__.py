"""The roles of a worker, prefill and decode, which execute the actions of the handoff."""
