"""A worker's ends of all links: its own connectors, and those of its other ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from baton.connector import choice
from baton.connector.memory import PoolMemory, pinned
from baton.connector.ranks.end import LocalEnd, Place, RankEnd
from baton.connector.ranks.ends import Ends
from baton.connector.ranks.frames import FrameError
from baton.connector.ranks.remote import EndMissingError, RemoteEnd
from baton.connector.ranks.share import Share
from baton.connector.staging import Staging, heap
from baton.engine.runner import ModelRunner
from baton.options import StartError
from baton.parallel.ranks import RankError
from baton.tls.files import TlsFiles

log = logging.getLogger(__name__)


async def make_ends(
    runner: ModelRunner,
    connector: str,
    host: str,
    elsewhere: Sequence[Place],
    on_crash: Callable[[], None],
    tls: TlsFiles | None = None,
) -> Ends:
    """``connector``: as the option. ``host``: on which data connections are accepted here; ``elsewhere``:
    where by the last ranks, which are on other nodes. ``tls``: what the services prove themselves by.

    Raises StartError if a connector that was asked for by name cannot be had, if the ranks have none in
    common, or if one of them is dead.
    """
    try:
        members: list[RankEnd] = [_local(runner, connector, host, on_crash, tls)]
        links = runner.ranks.serve_links() if runner.ranks is not None else []
        hosts = [host] * (len(links) - len(elsewhere)) + [place.host for place in elsewhere]
        for sock, at in zip(links, hosts, strict=True):
            end = await RemoteEnd.meet(sock, connector=connector, host=at, on_crash=on_crash, tls=tls)
            members.append(end)
    except (choice.ConnectorMissingError, EndMissingError, FrameError, RankError, OSError) as error:
        raise StartError(str(error)) from error
    ends = Ends(members)
    if not ends.connectors:
        raise StartError("the ranks of this worker have no connector in common")
    log.info("connectors, the best first: %s", ", ".join(ends.connectors))
    _say_what_protects(connector, tls)
    return ends


def _say_what_protects(connector: str, tls: TlsFiles | None) -> None:
    if tls is None:
        return
    if found := choice.encryption(connector, tls):
        log.info("KV blocks travel under %s (connector tcp)", found)
    else:
        log.warning(
            "--connector %s does not encrypt KV blocks, in spite of --worker-tls-certfile: "
            "its network must be private",
            connector,
        )


def _local(
    runner: ModelRunner, connector: str, host: str, on_crash: Callable[[], None], tls: TlsFiles | None
) -> LocalEnd:
    """This process leads: it holds the first heads of the first layers."""
    pool = runner.pool
    memory = PoolMemory(pool)
    staging = Staging(allocate=heap if memory.device is None else pinned)
    connectors = choice.available(
        connector, device=memory.device, host=host, on_crash=on_crash, staging=staging, tls=tls
    )
    _, num_heads, num_layers, _, _, _ = pool.shape
    return LocalEnd(connectors, memory, Share(range(num_heads), range(num_layers)))
