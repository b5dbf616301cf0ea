"""The gRPC server of a worker, and what it takes of whom."""

from __future__ import annotations

import grpc

from baton.connector.liveness import NO_PROBES
from baton.decoding import DecodingInterceptor
from baton.greeting.bounds import StrangersInterceptor

MOST_BYTES_PER_TOKEN = 5
"""Of a token id on the wire."""
BESIDE_TOKENS_BYTES = 8 << 20
"""Of a message, beside its tokens: sampling parameters with a grammar, forks, or the log-probabilities of a
prompt."""
MOST_STREAMS = 64
"""At once on one connection. Routers and prefill workers have one stream on each of theirs."""

_OPTIONS = (
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_concurrent_streams", MOST_STREAMS),
    *NO_PROBES,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A router that was given up while it read nothing: its stream ends with its connection.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # A second worker on a port in use must fail to start, not share it.
    ("grpc.so_reuseport", 0),
)


def longest_message(max_model_len: int) -> int:
    """Bytes of the longest message that a router or another worker can mean: a request with the longest
    prompt."""
    return BESIDE_TOKENS_BYTES + MOST_BYTES_PER_TOKEN * max_model_len


def make_server(max_model_len: int) -> grpc.aio.Server:
    """Without services and ports."""
    options = [*_OPTIONS, ("grpc.max_receive_message_length", longest_message(max_model_len))]
    return grpc.aio.server(interceptors=[StrangersInterceptor(), DecodingInterceptor()], options=options)
