"""What ``baton serve`` makes of one option of ``vllm serve``, and the few ways there are to make it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from baton.process.options import ConfigError

Verdict = Literal["same", "taken", "different", "refused"]
"""``same``: Baton has an option of this name and meaning. ``taken``: another option of Baton's, or what it
does anyway, means the same. ``different``: taken, with a difference that is told. ``refused``: by name."""

Arity = Literal["none", "one", "several"]
"""How many values an option has: none, as it is a switch; one; or one and more."""

Argv = Callable[[Sequence[str]], list[str]]
"""Turns an option's values into Baton's arguments. A switch has one value, ``on`` or ``off``. Raises
ValueError with what is wrong with a value."""

ON, OFF = "on", "off"


@dataclass(frozen=True, slots=True)
class VllmOption:
    """An option of ``vllm serve``: how it is spelled, what becomes of it, and why."""

    names: tuple[str, ...]
    """All spellings, the first being the one it is known by; of a switch without those that begin with
    ``--no-``."""
    verdict: Verdict
    why: str
    """A sentence: the difference, the reason, or what to use instead. Empty where there is nothing to say."""
    baton: str
    """Baton's option, as it is typed. Empty where there is none."""
    arity: Arity
    argv: Argv
    choices: tuple[str, ...] = ()
    """The only values that are taken. Those of a switch may follow it, as they follow Baton's own option."""

    @property
    def name(self) -> str:
        """The spelling that it is known by."""
        return self.names[0]

    def to_argv(self, values: Sequence[str], key: str = "") -> list[str]:
        """Baton's arguments for ``values``. ``key`` is what stands behind a dot, as in
        ``--speculative-config.method``. Raises ConfigError, which names the option as vLLM spells it; one
        that is refused always does."""
        if key:
            values = [json.dumps({key: _json_or_text(" ".join(values))})]
        try:
            return self.argv(values)
        except ValueError as error:
            name = self.name.lstrip("-")
            is_negated = self.arity == "none" and values[0] == OFF
            raise ConfigError(f"no-{name}" if is_negated else name, str(error)) from None


def same(spelling: str, why: str = "") -> VllmOption:
    """An option with one value that is Baton's own."""
    names = _names(spelling)
    return VllmOption(names, "same", why, names[0], "one", lambda values: [names[0], *values])


def renamed(
    spelling: str,
    baton: str,
    why: str = "",
    *,
    verdict: Verdict = "taken",
    read: Callable[[str], str | None] = lambda text: text,
) -> VllmOption:
    """An option with one value whose name or way of writing values differs. ``read`` writes a value as Baton
    does; None: it says nothing but the default."""

    def argv(values: Sequence[str]) -> list[str]:
        value = read(values[0])
        return [] if value is None else [baton, value]

    return VllmOption(_names(spelling), verdict, why, baton, "one", argv)


def repeated(
    spelling: str,
    why: str = "",
    *,
    arity: Arity = "one",
    read: Callable[[Sequence[str]], Sequence[str]] = lambda values: values,
) -> VllmOption:
    """An option with a list, which in Baton is given once for each item of it."""
    names = _names(spelling)

    def argv(values: Sequence[str]) -> list[str]:
        return [part for value in read(values) for part in (names[0], value)]

    return VllmOption(names, "taken", why, names[0], arity, argv)


def switch(
    spelling: str,
    on: Sequence[str] | str,
    off: Sequence[str] | str,
    why: str = "",
    *,
    verdict: Verdict = "taken",
) -> VllmOption:
    """A switch: Baton's arguments for it, and for its ``--no-`` form; a text instead is why that is
    refused."""
    names = _names(spelling)

    def argv(values: Sequence[str]) -> list[str]:
        found = on if values[0] == ON else off
        if isinstance(found, str):
            raise ValueError(_begin_small(found))
        return list(found)

    shown = " / ".join(" ".join(found) for found in (on, off) if found and not isinstance(found, str))
    return VllmOption(names, verdict, why, shown, "none", argv)


def fixed(spelling: str, allowed: Sequence[str], why: str) -> VllmOption:
    """An option whose values would have to be what Baton does anyway."""

    def argv(values: Sequence[str]) -> list[str]:
        if values[0] not in allowed:
            raise ValueError(f"must be {' or '.join(allowed)}, not {values[0]!r}: {_begin_small(why)}")
        return []

    return VllmOption(_names(spelling), "different", why, "", "one", argv, tuple(allowed))


def refused(why: str, *spellings: str, instead: str = "") -> tuple[VllmOption, ...]:
    """Options that are refused for one reason. ``instead``: Baton's option, or command, to use."""

    def argv(_: Sequence[str]) -> list[str]:
        use = f" Instead: {instead}." if instead else ""
        raise ValueError(f"no such option in Baton. {why}{use}")

    return tuple(VllmOption(_names(spelling), "refused", why, instead, "one", argv) for spelling in spellings)


def from_json(text: str) -> object:
    """The value of an option that is written in JSON. Raises ValueError that says so."""
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError:
        raise ValueError(f"{text!r} is not JSON") from None
    return value


def list_of_json(values: Sequence[str]) -> list[str]:
    """The texts of a list in JSON, as in ``'["a", "b"]'``; a text that begins otherwise is one of them, as
    Baton has it. Raises ValueError for another list."""
    if not values[0].startswith("["):
        return [values[0]]
    value = from_json(values[0])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"""must be a list of texts, such as '["a", "b"]', not {values[0]}""")
    return value


_WHOLE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)")
_POWERS = "kmgt"


def whole(text: str) -> str:
    """A number as vLLM reads it: ``1k`` is 1,000 and ``1K`` is 1,024. Raises ValueError for no number."""
    match = _WHOLE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no number; write it like 8192, 8k (8000) or 8K (8192)")
    unit = match[2]
    scale = (1000 if unit.islower() else 1024) ** (_POWERS.index(unit.lower()) + 1) if unit else 1
    return str(int(float(match[1]) * scale))


def mapped(names: Mapping[str, str | None]) -> Callable[[str], str | None]:
    """Read values by a mapping; those that are not in it stay as they are, for Baton to judge."""
    return lambda text: names.get(text, text)


def _names(spelling: str) -> tuple[str, ...]:
    """``--tensor-parallel-size/-tp``, taken apart."""
    return tuple(spelling.split("/"))


def _begin_small(sentence: str) -> str:
    """A sentence behind a colon. Names, such as CUDA and LoRA, keep their capitals."""
    second = sentence[1:2]
    return (
        sentence if second.isupper() or sentence.startswith("Baton") else sentence[:1].lower() + sentence[1:]
    )


def _json_or_text(text: str) -> object:
    try:
        return from_json(text)
    except ValueError:
        return text
