"""Sampling: the way from logits to tokens."""
