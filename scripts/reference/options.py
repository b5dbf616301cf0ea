"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from baton.cli.main import commands
from scripts.reference.markdown import code, plain, prose, table

HEAD = """\
# Options

Every command with all of its options, as `baton COMMAND --help` shows them. In the Helm chart an option is a
key in camelCase: `--max-num-seqs 64` of all workers is `workers.options: {maxNumSeqs: 64}`
([values](values.md#options-of-the-programs)). [Serving a model](../serving.md#options) has those that are
worth knowing.
"""


def page() -> str:
    """Return the page. Commands with the same options share a section."""
    root = typer.main.get_command(commands)
    alike: dict[str, list[tuple[str, str]]] = {}
    for name, command in _leaves(root, "baton"):
        alike.setdefault(_options(command), []).append((name, command.help or ""))
    parts = [HEAD]
    for options, named in alike.items():
        parts.append(f"## {', '.join(name for name, _ in named)}\n")
        parts += [prose(f"`{name}`: {text}" if len(named) > 1 else text) + "\n" for name, text in named]
        parts.append(options)
    return "\n".join(parts).rstrip() + "\n"


def _leaves(command: object, name: str) -> Iterator[tuple[str, TyperCommand]]:
    """Yield every command that can be run, with what is typed to run it."""
    if isinstance(command, TyperGroup):
        for below, each in command.commands.items():
            yield from _leaves(each, f"{name} {below}")
    elif isinstance(command, TyperCommand):
        yield name, command


def _options(command: TyperCommand) -> str:
    """Return the tables of a command: its arguments, then its options by their headings in the help."""
    arguments = [each for each in command.params if isinstance(each, TyperArgument) and not each.hidden]
    text = table(
        ("argument", "meaning"), ([code((each.name or "").upper()), _meaning(each)] for each in arguments)
    )
    panels: dict[str, list[TyperOption]] = {}
    for each in command.params:
        if isinstance(each, TyperOption) and not each.hidden:
            panels.setdefault(each.rich_help_panel or "", []).append(each)
    if not (arguments or panels):
        return "It takes no options.\n"
    tables = (
        (f"**{heading}**\n\n" if heading else "")
        + table(("option", "default", "meaning"), map(_row, options))
        for heading, options in panels.items()
    )
    return "\n".join(filter(None, [text, *tables]))


def _row(option: TyperOption) -> Sequence[str]:
    spelled = [code(name) for name in (*option.opts, *option.secondary_opts)]
    if option.metavar:
        spelled[-1] = code(f"{option.opts[-1]} {option.metavar}")
    return (", ".join(spelled), _default(option), _meaning(option))


def _default(option: TyperOption) -> str:
    if option.required:
        return "must be given"
    match option.default:
        case _ if not option.show_default:
            return ""
        case None | "" | () | []:
            return ""
        case bool(on):
            return "on" if on else "off"
        case value:
            return code(str(value))


def _meaning(parameter: TyperArgument | TyperOption) -> str:
    said = plain(parameter.help or "")
    if isinstance(parameter, TyperOption) and parameter.multiple and "give" not in said:
        said += " May be given several times."
    if parameter.envvar:
        said += f" Also read from {code(str(parameter.envvar))}."
    return said
