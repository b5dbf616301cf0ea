"""What the configurations of all services share: errors for the person at the keyboard, and the parsing of
sizes, addresses and model names. Imports no torch and no service."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path


class ModelError(ValueError):
    """A model cannot be found, read or served. The message is one line that names what is wrong and where."""


_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS |= {_prefix: 1024**_power, f"{_prefix}ib": 1024**_power, f"{_prefix}b": 1000**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)

LOG_LEVELS = ("debug", "info", "warning", "error")

_NEVER_IN_NAMES = frozenset(":[]/")

WILDCARDS = frozenset({"", "0.0.0.0", "::"})
"""Hosts to bind to that are no address to call back."""


class UserError(Exception):
    """Something the person at the keyboard can put right.

    The message is one clear line: the command line prints it without a traceback and exits with 1.
    """


class StartError(UserError):
    """A service cannot start, or cannot go on."""


class ConfigError(StartError):
    """An option has a value that cannot work. ``option`` is its field's name in the configuration."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"{flag(option)}: {problem}")
        self.option = option
        self.problem = problem


def flag(option: str) -> str:
    """The command-line spelling of a configuration field, so that an error names what was typed."""
    return "--" + option.replace("_", "-")


def parse_size(text: str) -> int:
    """The bytes in ``"2GiB"``, ``"512MB"``, ``"1.5g"`` or ``"1073741824"``. Raises ValueError otherwise."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write it like 2GiB, 512MB or 1073741824")
    return int(float(match[1]) * unit)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``"host:port"`` or ``"[v6]:port"``. Raises ValueError otherwise."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{text!r} is not an address; write it like 10.0.0.7:9000 or [fd00::7]:9000")
    if host[0] == "[" and host[-1] == "]" and is_ipv6(host[1:-1]):
        return host[1:-1], int(port)
    if set(host) & _NEVER_IN_NAMES:
        raise ValueError(
            f"{text!r} is not an address; an IPv6 address, and no other, has brackets, as in [fd00::7]:9000"
        )
    return host, int(port)


def is_ipv6(host: str) -> bool:
    """Whether ``host`` is an IPv6 address as it is written alone; it may have a zone (``fe80::1%eth0``)."""
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def join_address(host: str, port: int) -> str:
    """``host:port``, with the brackets an IPv6 host needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def loopback_beside(host: str) -> str:
    """The host of services that only this machine calls, beside one that listens on ``host``: the loopback
    address of its family."""
    return "::1" if is_ipv6(host) else "127.0.0.1"


def local_host(host: str) -> str:
    """What this machine calls to reach something of its own that is bound to ``host``."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def reachable_host(host: str) -> str:
    """What others call to reach something bound to ``host``: this machine's name for a wildcard."""
    return socket.gethostname() if host in WILDCARDS else host


def served_name(model: str, served_model_name: str | None) -> str:
    """The name clients use for a model: the chosen one, a directory's own name, or what was given."""
    if served_model_name:
        return served_model_name
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def check_range(option: str, value: float, low: float, high: float | None = None) -> None:
    """Raise ConfigError unless ``low <= value <= high``."""
    if value < low:
        raise ConfigError(option, f"must be at least {low}, not {value}")
    if high is not None and value > high:
        raise ConfigError(option, f"must be at most {high}, not {value}")


def check_filled(option: str, value: str) -> None:
    """Raise ConfigError for an empty text."""
    if not value:
        raise ConfigError(option, "must not be empty")


def check_host(option: str, host: str) -> None:
    """Raise ConfigError unless ``host`` could be a name or an address by itself, without port and
    brackets."""
    if set(host) & _NEVER_IN_NAMES and not is_ipv6(host):
        raise ConfigError(option, f"must be a host alone, such as 10.0.0.7 or fd00::7, not {host!r}")


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(option, f"must be one of {', '.join(choices)}, not {value!r}")
