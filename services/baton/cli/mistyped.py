"""What a command line that cannot be parsed is answered: one line, with what was probably meant."""

from __future__ import annotations

import difflib

import typer


def message_of(error: typer.TyperException) -> str:
    """One line for a person on what is wrong with what was typed.

    ``NoSuchOption`` is known by its name: typer has no public class of that kind.
    """
    option: str | None = getattr(error, "option_name", None)
    context: typer.Context | None = getattr(error, "ctx", None)
    if type(error).__name__ != "NoSuchOption" or option is None or context is None:
        return error.format_message()
    known = [
        name
        for parameter in context.command.get_params(context)
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("-")
    ]
    meant = difflib.get_close_matches(option, known, n=1)
    hint = f"did you mean {meant[0]}?" if meant else f"see {context.command_path} --help"
    return f"{option}: no such option; {hint}"
