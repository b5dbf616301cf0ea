"""The PEM files that a service proves itself by, and those it proves others by."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.options import ConfigError, flag
from baton.watched import WatchedFiles

ClientAuth = Literal["none", "required"]
CLIENT_AUTHS: tuple[ClientAuth, ...] = ("none", "required")


@dataclass(frozen=True, slots=True, repr=False)
class Pem:
    """What is in the files. No repr: one of them is a secret."""

    certificate: bytes
    key: bytes
    ca: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """One pair of certificate and key, and who signs the other side's."""

    options: str
    """What the options that name them begin with, for errors."""
    certificate: str
    key: str
    ca: str | None
    mutual: bool
    """Only clients with a certificate of ``ca`` are served."""
    server_name: str | None = None
    """What servers' certificates are for; None: the host that is called."""

    @classmethod
    def given(
        cls,
        options: str,
        certificate: str | None,
        key: str | None,
        ca: str | None,
        *,
        mutual: bool,
        server_name: str | None = None,
    ) -> TlsFiles | None:
        """What options say; None: none was given. Raises ConfigError when one is missing, or a file cannot be
        used."""
        if certificate is None:
            for name, value in (("keyfile", key), ("ca_certs", ca), ("server_name", server_name)):
                if value is not None:
                    raise ConfigError(f"{options}_{name}", f"needs {flag(options)}-certfile")
            if mutual and options == "ssl":
                raise ConfigError("ssl_client_auth", "required needs --ssl-certfile")
            return None
        if key is None:
            raise ConfigError(f"{options}_certfile", f"needs {flag(options)}-keyfile")
        if mutual and ca is None:
            raise ConfigError(f"{options}_certfile", f"needs {flag(options)}-ca-certs")
        files = cls(
            options=options, certificate=certificate, key=key, ca=ca, mutual=mutual, server_name=server_name
        )
        files.read()
        return files

    @property
    def paths(self) -> list[str]:
        return [path for path in (self.certificate, self.key, self.ca) if path is not None]

    def watch(self) -> WatchedFiles:
        return WatchedFiles(self.paths)

    def read(self) -> Pem:
        """What is in the files now. Raises ConfigError when one cannot be read, or they do not fit."""
        pem = Pem(
            self._read("certfile", self.certificate),
            self._read("keyfile", self.key),
            None if self.ca is None else self._read("ca_certs", self.ca),
        )
        self.context()  # its checks are those that gRPC leaves out
        return pem

    def context(self) -> ssl.SSLContext:
        """For a server. Raises ConfigError when the files do not fit."""
        context = self._loaded(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
        if self.mutual:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """For who calls such a server: trusts ``ca`` alone, and wants the host's name in the certificate.
        Raises likewise."""
        return self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.options}_certfile", f"{self.certificate} and {self.key} cannot be used: {error}"
            ) from None
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{self.options}_ca_certs", f"{self.ca} cannot be used: {error}") from None
        return context

    def _read(self, name: str, path: str) -> bytes:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{self.options}_{name}", f"{path}: {error.strerror or error}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted, and there is nobody to ask for its password")
