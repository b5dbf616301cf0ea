"""Which connectors a worker has, and which one a pair of workers uses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from baton.connector.group import GroupConnector
from baton.connector.staging import Staging
from baton.connector.tcp import TcpConnector
from baton.connector.transport import Connector
from baton.tls.files import TlsFiles
from baton.tls.session import DataTls

log = logging.getLogger(__name__)


class ConnectorMissingError(Exception):
    """A connector was asked for by name and cannot be had; says what to do."""


ENCRYPTION = "TLS 1.3"


def encryption(wanted: str, tls: TlsFiles | None) -> str:
    """What protects KV blocks on their way; empty: nothing, as only ``tcp`` has something. ``wanted`` and
    ``tls`` as ``available`` takes them."""
    return ENCRYPTION if tls is not None and wanted in ("auto", "tcp") else ""


def available(
    wanted: str,
    *,
    device: int | None,
    host: str,
    on_crash: Callable[[], None],
    staging: Staging,
    tls: TlsFiles | None = None,
) -> dict[str, Connector]:
    """The connectors that ``wanted`` (of worker.config.CONNECTORS) means, the best first.

    ``device``: the CUDA device that the pool is on, if it is on one. ``host`` is what they will listen on.
    ``on_crash`` is called on the event loop when a thread of theirs met what it did not expect: pages could
    stay pinned for ever, so it must end the worker. ``tls``: the services have certificates. Then ``auto`` is
    ``tcp`` alone, whose connections are encrypted, and another connector is had by its name only. Raises
    ConnectorMissingError, and ConfigError for files that cannot be used here.

    Without, ``auto`` is every one that works here. ``tcp`` goes before ``gloo``, which is there to be tested,
    and ``nccl`` after ``ucx``, which needs no host memory in between.
    """
    group = "gloo" if device is None else "nccl"
    if wanted in ("nccl", "gloo"):
        return {group: GroupConnector(group, staging, on_crash, device)}
    if wanted == "tcp" or (wanted == "auto" and tls is not None):
        return {"tcp": TcpConnector(staging, on_crash, None if tls is None else DataTls(tls))}
    try:
        ucx = _ucx(staging, on_crash, host)
    except ConnectorMissingError as error:
        if wanted == "ucx":
            raise
        log.info("without the connector ucx: %s", error)
        ucx = None
    if wanted == "ucx" and ucx is not None:
        return {"ucx": ucx}
    order: list[Connector] = [
        TcpConnector(staging, on_crash),
        GroupConnector(group, staging, on_crash, device),
    ]
    if device is not None:
        order.reverse()
    return {connector.name: connector for connector in ([ucx] if ucx is not None else []) + order}


def _ucx(staging: Staging, on_crash: Callable[[], None], host: str) -> Connector:
    try:
        from baton.connector.ucx import UcxConnector
        from baton.connector.ucx_driver import interface_options

        return UcxConnector(staging, on_crash, interface_options(host))
    except ImportError as error:
        reason = f"the connector ucx needs ucxx: pip install 'baton[ucx]' ({error})"
        raise ConnectorMissingError(reason) from error
    except Exception as error:
        # ucxx makes its exceptions at run time; UCX has none of the transports that UCX_TLS names, for one.
        raise ConnectorMissingError(f"UCX does not start: {error}") from error


def first_common(offered: Sequence[str], ours: Collection[str]) -> str | None:
    """The first of the peer's connectors, the best first, that is here too."""
    return next((name for name in offered if name in ours), None)
