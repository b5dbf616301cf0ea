"""From a model's text to what it means: reasoning, content and calls of tools. Imports no torch."""
