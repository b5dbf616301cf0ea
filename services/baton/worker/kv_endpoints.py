"""A worker's endpoints of all links: the connectors of this process, and those of its other ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from baton.net.certificates import TlsFiles
from baton.parallel.ranks import RankError, Ranks
from baton.process.options import StartError
from baton.transport import registry
from baton.transport.base import ConnectorMissingError, ConnectorSettings
from baton.transport.pool_memory import PoolMemory
from baton.transport.ranks.endpoint import LocalEndpoint, RankAddress, RankEndpoint
from baton.transport.ranks.endpoints import RankEndpoints
from baton.transport.ranks.frames import FrameError
from baton.transport.ranks.remote import EndpointMissingError, RemoteEndpoint
from baton.transport.ranks.shard import whole_shard

log = logging.getLogger(__name__)


async def make_ends(
    memory: PoolMemory,
    ranks: Ranks | None,
    connector: str,
    host: str,
    elsewhere: Sequence[RankAddress],
    on_crash: Callable[[], None],
    tls: TlsFiles | None = None,
    *,
    require_rdma: bool = False,
) -> RankEndpoints:
    """Make the endpoints of all ranks. ``memory``: the pool of this process, the leader. ``ranks``: the other
    ranks. ``connector``: the option. ``host``: where this node accepts data connections. ``elsewhere``: the
    addresses of the last ranks, which are on other nodes. ``tls``: the services' certificates.
    ``require_rdma``: the option.

    Raises StartError if a connector that is named cannot be made, if none has the RDMA that is required, if
    the ranks have no connector in common, or if a rank is dead.
    """
    settings = memory.connector_settings(on_crash, host, tls, require_rdma=require_rdma)
    try:
        members: list[RankEndpoint] = [_local(memory, connector, settings)]
        links = ranks.serve_links() if ranks is not None else []
        hosts = [host] * (len(links) - len(elsewhere)) + [place.host for place in elsewhere]
        for sock, at in zip(links, hosts, strict=True):
            end = await RemoteEndpoint.meet(
                sock, connector=connector, host=at, on_crash=on_crash, tls=tls, require_rdma=require_rdma
            )
            members.append(end)
    except (ConnectorMissingError, EndpointMissingError, FrameError, RankError, OSError) as error:
        raise StartError(str(error)) from error
    ends = RankEndpoints(members)
    if not ends.connectors:
        raise StartError("the ranks of this worker have no connector in common")
    log.info("connectors, the best first: %s", ", ".join(ends.connectors))
    _say_what_protects(connector, ends.connectors, tls)
    return ends


def _say_what_protects(connector: str, made: Sequence[str], tls: TlsFiles | None) -> None:
    if tls is None:
        return
    if found := registry.encryption(connector, tls):
        log.info("KV blocks travel under %s (connector %s)", found, ", ".join(made))
    else:
        log.warning(
            "--connector %s does not encrypt KV blocks, in spite of --worker-tls-certfile: "
            "its network must be private",
            connector,
        )


def _local(memory: PoolMemory, connector: str, settings: ConnectorSettings) -> LocalEndpoint:
    """Return the endpoint of this process, the leader, which holds the first heads of the first layers."""
    memory.enter()  # the libraries meet the device's memory on this thread too
    connectors = registry.available(connector, settings)
    return LocalEndpoint(connectors, memory, whole_shard(memory.layout.groups))
