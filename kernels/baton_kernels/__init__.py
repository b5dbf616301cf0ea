"""Baton's kernels, each beside its plain-torch reference."""
