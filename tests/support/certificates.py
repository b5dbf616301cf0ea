"""Certificates for tests, made with the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from baton.net.certificates import TlsFiles

LOOPBACK = "IP:127.0.0.1,IP:::1,DNS:localhost"


@dataclass(frozen=True)
class Pair:
    certificate: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """Signs certificates for the loopback addresses and localhost."""

    folder: Path
    pair: Pair

    @classmethod
    def new(cls, folder: Path, name: str = "authority") -> Authority:
        folder.mkdir(parents=True, exist_ok=True)
        pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
        _openssl(
            "req", "-x509", "-days", "2", "-nodes", "-subj", f"/CN={name}", *_NEW_KEY,
            "-keyout", str(pair.key), "-out", str(pair.certificate),
            "-addext", "basicConstraints=critical,CA:TRUE",
        )  # fmt: skip
        return cls(folder, pair)

    @classmethod
    def at(cls, folder: Path, name: str = "authority") -> Authority:
        """One that was made there before."""
        return cls(folder, Pair(folder / f"{name}.crt", folder / f"{name}.key"))

    def sign(self, name: str, hosts: str = LOOPBACK) -> Pair:
        pair = self._pair(name)
        _openssl(
            "req", "-x509", "-days", "2", "-nodes", "-subj", f"/CN={name}", *_NEW_KEY,
            "-keyout", str(pair.key), "-out", str(pair.certificate),
            "-CA", str(self.pair.certificate), "-CAkey", str(self.pair.key),
            "-addext", f"subjectAltName={hosts}", "-addext", "basicConstraints=critical,CA:FALSE",
        )  # fmt: skip
        return pair

    def _pair(self, name: str) -> Pair:
        return Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")

    def files(self, name: str, *, mutual: bool = True, hosts: str = LOOPBACK) -> TlsFiles:
        """What a service of this name is given."""
        self.sign(name, hosts)
        return self.given(name, mutual=mutual)

    def given(self, name: str, *, mutual: bool = True) -> TlsFiles:
        """Likewise, of what was signed before."""
        pair = self._pair(name)
        return TlsFiles(
            options="worker_tls",
            certificate=str(pair.certificate),
            key=str(pair.key),
            ca=str(self.pair.certificate),
            mutual=mutual,
        )


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=120)
