"""The commands that the README shows, in the order in which a newcomer meets them."""

from __future__ import annotations

import re
from pathlib import Path

_BLOCK = re.compile(r"^```(?:sh|bash|console)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`((?:\.venv/bin/)?baton(?: [\w./-]+)+)`")
_COMMAND = re.compile(r"(?:make|curl|pip|pipx|git|\.venv/bin/\w+|baton) ")


def commands(readme: str) -> list[str]:
    """Return the command lines of a text's blocks, then those of Baton that stand in its sentences.

    Lines that end in a backslash are joined with the next, and a remark behind two spaces is left out.
    """
    lines: list[str] = []
    for block in _BLOCK.findall(readme):
        joined = re.sub(r"\\\n\s*", "", block)
        lines += [re.sub(r"\s\s+#.*", "", line) for line in joined.splitlines() if _COMMAND.match(line)]
    prose = _BLOCK.sub("", readme)
    return lines + [" ".join(found.split()) for found in _INLINE.findall(prose) if _is_a_start(found)]


def of_file(path: Path) -> list[str]:
    return commands(path.read_text())


def at_port(command: str, port: int) -> str:
    """Return a command that calls the server at another port than the default."""
    return command.replace("127.0.0.1:8000", f"127.0.0.1:{port}")


def _is_a_start(command: str) -> bool:
    """Say whether a mention of a command has an option or a path, and so is meant to be typed."""
    return command.startswith(".venv/") or " --" in command
