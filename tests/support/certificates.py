"""Certificates for tests, made with the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from baton.tls.files import TlsFiles


@dataclass(frozen=True)
class Pair:
    certificate: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """Signs certificates for 127.0.0.1 and localhost."""

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

    def sign(self, name: str, hosts: str = "IP:127.0.0.1,DNS:localhost") -> Pair:
        pair = Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        _openssl(
            "req", "-x509", "-days", "2", "-nodes", "-subj", f"/CN={name}", *_NEW_KEY,
            "-keyout", str(pair.key), "-out", str(pair.certificate),
            "-CA", str(self.pair.certificate), "-CAkey", str(self.pair.key),
            "-addext", f"subjectAltName={hosts}", "-addext", "basicConstraints=critical,CA:FALSE",
        )  # fmt: skip
        return pair

    def files(self, name: str, *, mutual: bool = True, hosts: str = "IP:127.0.0.1,DNS:localhost") -> TlsFiles:
        """What a service of this name is given."""
        pair = self.sign(name, hosts)
        return TlsFiles(
            options="worker_tls",
            certificate=str(pair.certificate),
            key=str(pair.key),
            ca=str(self.pair.certificate),
            mutual=mutual,
        )


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
