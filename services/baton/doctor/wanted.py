"""What a machine is examined for: the services that are to run on it, and what they are to use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from baton.process.common_options import Host
from baton.process.fields import Option, check_options
from baton.process.options import ConfigError
from baton.worker.config import WorkerConfig

Part = Literal["ring", "router", "prefill", "decode", "worker"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The services that are to run here, and their settings. Raises ConfigError for a value that cannot
    work."""

    role: Annotated[
        Part,
        Option(
            "What is to run here: router, prefill, decode, worker (of any role), or ring (a router with its "
            "workers). Only what that needs can lack."
        ),
    ] = "ring"
    host: Host = "127.0.0.1"
    port: Annotated[
        tuple[str, ...],
        Option(
            "A port that must be free; give it once for each. Default: those that the services listen on "
            "unless told otherwise.",
            flags="--port",
            metavar="PORT",
        ),
    ] = ()
    router: Annotated[
        str | None,
        Option("A router that must answer, such as http://127.0.0.1:8000.", metavar="URL"),
    ] = None
    redis: Annotated[
        str | None,
        Option("A Redis that must answer, as --redis-url of the router.", metavar="URL"),
    ] = None
    timeout: Annotated[
        float,
        Option(
            "Longest time for an answer from the router, Redis or the hub.",
            metavar="SECONDS",
            least=0.1,
            most=60,
        ),
    ] = 3.0
    worker: WorkerConfig = field(default_factory=lambda: WorkerConfig(role="both"))
    """The settings of the workers that are to run here."""

    def __post_init__(self) -> None:
        check_options(self)
        for port in self.port:
            if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
                raise ConfigError("port", f"must be a number from 1 to 65535, not {port!r}")

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports that must be free; empty: those that services listen on unless told otherwise."""
        return tuple(map(int, self.port))

    @property
    def computes(self) -> bool:
        """Whether workers are to run here."""
        return self.role != "router"

    @property
    def routes(self) -> bool:
        """Whether a router is to run here."""
        return self.role in ("ring", "router")
