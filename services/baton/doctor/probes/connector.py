"""Starts a connector as a worker does, and prints what it lacks, or the transports that it has.

Its arguments are the connector's name and the host that the worker listens on.
"""

from __future__ import annotations

import asyncio
import sys

import orjson

from baton.transport.base import Connector, ConnectorMissingError, ConnectorSettings
from baton.transport.registry import available, missing_for_rdma
from baton.transport.staging import Staging


def main() -> None:
    name, host = sys.argv[1:]
    print(orjson.dumps(asyncio.run(_told(name, host))).decode(), flush=True)


async def _told(name: str, host: str) -> dict[str, object]:
    settings = ConnectorSettings(staging=Staging(), on_crash=lambda: None, host=host)
    try:
        connector = available(name, settings)[name]
    except ConnectorMissingError as error:
        absent = isinstance(error.__cause__, ImportError)
        return {"missing": str(error), "installed": not absent}
    transports, rdma = _transports(connector), missing_for_rdma(connector)
    await connector.close()
    return {
        "missing": "",
        "installed": True,
        "transports": " ".join(sorted(transports)),
        "missing_for_rdma": rdma,
    }


def _transports(connector: Connector) -> frozenset[str]:
    """UCX's names of the ways that a connector has; none of one that does not tell."""
    from baton.transport.ucx import UcxConnector

    return connector.transports if isinstance(connector, UcxConnector) else frozenset()


if __name__ == "__main__":
    main()
