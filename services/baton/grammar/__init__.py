"""Grammars for guided decoding: checked, tried out where they can do no harm, compiled and kept."""
