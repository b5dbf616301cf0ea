"""What a command line that cannot be parsed is answered: one line, with what was probably meant."""

from __future__ import annotations

import difflib

import typer
from typer._click.exceptions import NoSuchOption  # typer shows it nowhere else


def message_of(error: typer.TyperException) -> str:
    """One line for a person on what is wrong with what was typed."""
    if not isinstance(error, NoSuchOption) or error.ctx is None:
        return error.format_message()
    command = error.ctx.command
    known = [
        name
        for parameter in command.get_params(error.ctx)
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("-")
    ]
    meant = difflib.get_close_matches(error.option_name, known, n=1)
    hint = f"did you mean {meant[0]}?" if meant else f"see {error.ctx.command_path} --help"
    return f"{error.option_name}: no such option; {hint}"
