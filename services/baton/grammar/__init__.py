"""Grammars for guided decoding: checked, tried out in a separate process, compiled and cached."""
