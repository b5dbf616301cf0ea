"""Errors that end a command with one line for the person who typed it."""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be found, read or served. The message is one line that names what is wrong and where."""
