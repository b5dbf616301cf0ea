"""The file of API keys: its format, and reading it again when it changes.

The file holds the SHA-256 of each key, not the key. A slow hash (bcrypt, scrypt) makes guesses expensive
where people choose the secret. These keys are 256 random bits, which cannot be guessed at any speed, and a
slow hash would cost each request as much as a guess.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from baton.core.priority import MAX_PRIORITY
from baton.net.file_watcher import WatchedFiles
from baton.process.options import ConfigError
from baton.router.security.client import Client
from baton.router.shared.limits import Limits, Tenant

log = logging.getLogger(__name__)

PREFIX = "baton-"
KEY_BYTES = 32
MAX_KEY = 512
RELOAD_S = 1.0
MAX_BYTES = 16 << 20
MAX_KEYS = 100_000

_NAME = re.compile(r"[A-Za-z0-9._@/-]{1,64}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


class _TenantEntry(msgspec.Struct, forbid_unknown_fields=True):
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None


class _KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    hash: str
    tenant: str
    models: list[str] | None = None
    operator: bool = False
    most_urgent: int = -MAX_PRIORITY


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_KeyEntry]
    tenants: dict[str, _TenantEntry] = {}


class KeysError(Exception):
    """The file cannot be used. The text is one line, which quotes nothing of the file but names."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The clients of a file, by the digests of their keys."""

    clients: Mapping[bytes, Client]

    def find(self, key: str) -> Client | None:
        """Return the client of ``key``, or None. Digests are compared, never keys: the timing can only reveal
        how far the digest of a guess agrees with a known digest, and nobody can choose a guess by its
        digest."""
        return self.clients.get(digest_of(key)) if len(key) <= MAX_KEY else None


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def new_key() -> str:
    """Return a new key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def entry_line(key: str, name: str, tenant: str) -> str:
    """Return the entry of ``key``, to be added under ``keys:``; YAML and, but for the dash, JSON. Raises
    KeysError for an invalid name."""
    _check_name("name", name)
    _check_name("tenant", tenant)
    return f'- {{"name": "{name}", "hash": "sha256:{digest_of(key).hex()}", "tenant": "{tenant}"}}'


def file_of(keys: Sequence[str], tenant: str) -> bytes:
    """Return a file with the digests of ``keys``, all of one tenant, who may see everything. Raises KeysError
    for a key that no client could send, and for one that is there twice."""
    if any(not key or len(key) > MAX_KEY for key in keys):
        raise KeysError(f"a key has 1 to {MAX_KEY} characters")
    if len(set(keys)) < len(keys):
        raise KeysError("the same key is given twice")
    entries = [
        _KeyEntry(f"{tenant}-{at}", f"sha256:{digest_of(key).hex()}", tenant, operator=True)
        for at, key in enumerate(keys)
    ]
    return msgspec.json.encode(_File(entries))


def parse(data: bytes, defaults: Limits) -> Keys:
    """Parse a file, YAML or JSON (which is YAML). ``defaults``: the limits that a tenant does not set. Raises
    KeysError."""
    try:
        file = msgspec.yaml.decode(data, type=_File)
    except msgspec.ValidationError as error:
        raise KeysError(str(error)) from None
    except Exception as error:  # noqa: BLE001 - the parser's own errors, which quote the text
        raise KeysError(f"it is neither YAML nor JSON{_line_of(error)}") from None
    if len(file.keys) > MAX_KEYS:
        raise KeysError(f"it has {len(file.keys)} keys; at most {MAX_KEYS} are allowed")
    tenants = {name: _tenant(name, entry, defaults) for name, entry in file.tenants.items()}
    clients: dict[bytes, Client] = {}
    names: set[str] = set()
    for index, entry in enumerate(file.keys):
        where = f"keys[{index}]"
        _check_name(f"{where}.name", entry.name)
        _check_name(f"{where}.tenant", entry.tenant)
        if entry.name in names:
            raise KeysError(f"{where}.name is {entry.name!r}, which another key has")
        names.add(entry.name)
        digest = _digest(where, entry.hash)
        if digest in clients:
            raise KeysError(f"{where}.hash is that of key {clients[digest].key!r} too")
        if not -MAX_PRIORITY <= entry.most_urgent <= MAX_PRIORITY:
            raise KeysError(
                f"{where}.most_urgent is {entry.most_urgent}; it must be between {-MAX_PRIORITY} and "
                f"{MAX_PRIORITY}"
            )
        clients[digest] = Client(
            tenant=tenants.get(entry.tenant) or Tenant(entry.tenant, defaults),
            key=entry.name,
            models=None if entry.models is None else frozenset(entry.models),
            operator=entry.operator,
            most_urgent=entry.most_urgent,
        )
    return Keys(clients)


def _line_of(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    line = getattr(mark, "line", None)
    return "" if line is None else f" (line {line + 1})"


def _digest(where: str, text: str) -> bytes:
    if not _HASH.fullmatch(text):  # not quoted: it may be the key itself
        raise KeysError(
            f"{where}.hash must be sha256: and 64 hexadecimal digits, as `baton keys create` prints"
        )
    return bytes.fromhex(text.removeprefix("sha256:"))


def _check_name(where: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise KeysError(f"{where} must be 1 to 64 letters, digits and . _ @ / -")
    if name.startswith(PREFIX) and len(name) >= len(PREFIX) + KEY_BYTES:
        raise KeysError(f"{where} looks like a key; names are told in logs")


def _tenant(name: str, entry: _TenantEntry, defaults: Limits) -> Tenant:
    _check_name("the name of a tenant", name)

    def limit(field: str, given: int | None, default: int | None) -> int | None:
        if given is not None and not 1 <= given <= 10**12:
            raise KeysError(f"tenants.{name}.{field} is {given}; it must be between 1 and 10**12")
        return default if given is None else given

    if not 0.001 <= entry.weight <= 1000:
        raise KeysError(f"tenants.{name}.weight is {entry.weight:g}; it must be between 0.001 and 1000")
    limits = Limits(
        requests_per_minute=limit(
            "requests_per_minute", entry.requests_per_minute, defaults.requests_per_minute
        ),
        tokens_per_minute=limit("tokens_per_minute", entry.tokens_per_minute, defaults.tokens_per_minute),
        concurrent=limit("concurrent_requests", entry.concurrent_requests, defaults.concurrent),
        tokens_per_day=limit("tokens_per_day", entry.tokens_per_day, defaults.tokens_per_day),
    )
    return Tenant(name, limits, entry.weight)


class KeyFile:
    """The keys of a file, following its changes."""

    def __init__(self, path: str, defaults: Limits) -> None:
        """Raises ConfigError when the file cannot be used: a router must not start without keys."""
        self._path = path
        self._defaults = defaults
        self._watch = WatchedFiles([path])
        try:
            self._keys = self._read()
        except KeysError as error:
            raise ConfigError("api_keys", f"{path}: {error}") from None

    def find(self, key: str) -> Client | None:
        return self._keys.find(key)

    async def run(self) -> NoReturn:
        """Follow the file for as long as the router lives."""
        while True:
            await asyncio.sleep(RELOAD_S)
            await asyncio.to_thread(self.follow)  # a long file takes a while

    def follow(self) -> None:
        """Read the file again if it has changed. While it cannot be used, the keys stay as they were."""
        if not self._watch.changed():
            return
        try:
            self._keys = self._read()
        except KeysError as error:
            log.error("%s has changed and cannot be used, the keys stay as they were: %s", self._path, error)
        else:
            log.info("%s: %d keys", self._path, len(self._keys.clients))

    def _read(self) -> Keys:
        try:
            with Path(self._path).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise KeysError(f"it cannot be read: {error.strerror or error}") from None
        if len(data) > MAX_BYTES:
            raise KeysError(f"it has more than {MAX_BYTES} bytes")
        return parse(data, self._defaults)
