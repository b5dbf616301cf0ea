"""Processes that read large bodies: JSON, templates and tokenizers hold the interpreter's lock for as long as
they take, so that threads could not keep the event loop free of them."""
