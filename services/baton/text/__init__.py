"""Text in, tokens out, and back: tokenizing, chat templates, incremental detokenizing, stop strings."""
