"""What comes with a gRPC call that failed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc


def metadata_of(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """The metadata at its end: pairs, which is not what grpc's type hints say."""
    return dict(cast("Iterable[tuple[str, str]]", error.trailing_metadata() or ()))
