"""Conversion between text and tokens: tokenizing, chat templates, incremental detokenizing, stop strings."""
