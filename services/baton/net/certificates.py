"""The PEM files by which a service proves its identity and verifies its peers."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.net.file_watcher import WatchedFiles
from baton.process.options import ConfigError, flag

ClientAuth = Literal["none", "required"]


@dataclass(frozen=True, slots=True, repr=False)
class Pem:
    """The contents of the files. No repr: the key is a secret."""

    certificate: bytes
    key: bytes
    ca: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """A pair of certificate and key, and the authority that signs the peers' certificates."""

    options: str
    """The prefix of the options that name the files, for errors."""
    certificate: str
    key: str
    ca: str | None
    mutual: bool
    """Whether only clients with a certificate of ``ca`` are served."""
    server_name: str | None = None
    """The name that servers' certificates must have. None: the host that is called."""

    @classmethod
    def from_options(
        cls,
        options: str,
        certificate: str | None,
        key: str | None,
        ca: str | None,
        *,
        mutual: bool,
        server_name: str | None = None,
    ) -> TlsFiles | None:
        """Return the files that the options name, or None if no option was given. Raises ConfigError when an
        option is missing, or a file cannot be used."""
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
        """Read the files. Raises ConfigError when one cannot be read, or when certificate and key do not
        match."""
        pem = Pem(
            self._read("certfile", self.certificate),
            self._read("keyfile", self.key),
            None if self.ca is None else self._read("ca_certs", self.ca),
        )
        self.context()  # makes the checks that gRPC leaves out
        return pem

    def context(self) -> ssl.SSLContext:
        """Return a server's context. Raises ConfigError when certificate and key do not match."""
        context = self._loaded(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
        if self.mutual:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return a client's context, which trusts ``ca`` alone and requires the host's name in the server's
        certificate. Raises ConfigError when certificate and key do not match."""
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
