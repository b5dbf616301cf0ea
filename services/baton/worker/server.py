"""The gRPC server of a worker, and the bounds of what it accepts."""

from __future__ import annotations

import grpc

from baton.greeting.bounds import StrangersInterceptor
from baton.greeting.proofs import CALLERS_MESSAGES
from baton.net.decoding import DecodingInterceptor
from baton.net.heartbeat import NO_PROBES
from baton.net.message_parts import CONNECT, LINK, MAX_WHOLE_BYTES, Joiner
from baton.v1.handoff_pb2 import PrefillMessage
from baton.v1.worker_pb2 import RouterMessage

MAX_BYTES_PER_TOKEN = 5
"""Most bytes of a token id as a varint."""
BESIDE_TOKENS_BYTES = 8 << 20
"""Most bytes of a message beside its tokens: sampling parameters with a grammar, forks, or the
log-probabilities of a prompt."""
MAX_STREAMS = 64
"""Most streams at once on one connection. Routers and prefill workers have one stream on each connection."""

_OPTIONS = (
    # gRPC has one bound for a port, which holds for unproved callers, too. Longer messages come in parts.
    ("grpc.max_receive_message_length", MAX_WHOLE_BYTES),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    *NO_PROBES,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A router that was given up while it read nothing has a stream that ends with its connection only.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # A second worker on a port in use must fail to start, not share it.
    ("grpc.so_reuseport", 0),
)


def max_message(max_model_len: int) -> int:
    """Return the bytes of the longest valid message of a router or another worker, all its parts together: a
    request with the longest prompt."""
    return BESIDE_TOKENS_BYTES + MAX_BYTES_PER_TOKEN * max_model_len


def make_server(max_model_len: int) -> grpc.aio.Server:
    """Return a server without services and ports."""
    most = max_message(max_model_len)
    decoding = DecodingInterceptor(
        decoders={
            CONNECT: lambda: Joiner(RouterMessage, most, CALLERS_MESSAGES).read,
            LINK: lambda: Joiner(PrefillMessage, most, CALLERS_MESSAGES).read,
        }
    )
    return grpc.aio.server(interceptors=[StrangersInterceptor(), decoding], options=_OPTIONS)
