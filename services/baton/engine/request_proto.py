"""Requests as protobuf, and back: a worker makes a sequence of each message."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from dataclasses import replace

from baton.core.priority import Priority
from baton.core.sampling_params import ResolvedSampling
from baton.engine.sequence import Fork, Sequence
from baton.greeting.names import check_name
from baton.request.limits import MAX_ANSWERS
from baton.v1 import handoff_pb2, worker_pb2

MAX_SALT_BYTES = 64
"""Most bytes of a cache salt. Routers make digests of 32 bytes."""


def sequence_from(message: worker_pb2.Submit | handoff_pb2.Ask) -> Sequence:
    """The request of a message, with its times relative to now. ValueError, for the client, if its names or
    its forks are invalid."""
    if isinstance(message, worker_pb2.Submit):
        request_id, attempt, owner = message.request_id, message.attempt, ""
    else:
        request_id, attempt, owner = message.name.request_id, message.name.attempt, message.router_id
        check_name("router_id", owner)
    check_name("request_id", request_id)
    if len(message.cache_salt) > MAX_SALT_BYTES:
        raise ValueError(
            f"cache_salt: must have at most {MAX_SALT_BYTES} bytes, not {len(message.cache_salt)}"
        )
    params = ResolvedSampling.from_proto(message.params)
    output_ids, first_token = list(message.output_ids), None
    if message.forks:
        _check(request_id, message.forks)
        first_token, output_ids = _first_token(output_ids), []
    return Sequence(
        request_id=request_id,
        attempt=attempt,
        prompt_ids=array("I", message.prompt_ids),
        output_ids=output_ids,
        params=params,
        owner=owner,
        cache_salt=message.cache_salt,
        priority=Priority.from_proto(message.priority, time.monotonic()),
        first_token=first_token,
        forks=tuple(
            Fork(fork.request_id, replace(params, seed=fork.seed), _first_token(fork.output_ids))
            for fork in message.forks
        ),
    )


def delivered_tokens(sequence: Sequence) -> list[int]:
    """The outputs that a sequence was given at its start; at most one if it has forks."""
    if sequence.first_token is not None:
        return [sequence.first_token]
    return sequence.output_ids[: sequence.resumed_from]


def forks_to_proto(sequence: Sequence) -> list[worker_pb2.Fork]:
    return [
        worker_pb2.Fork(
            request_id=fork.request_id,
            seed=fork.params.seed,
            output_ids=() if fork.first_token is None else (fork.first_token,),
        )
        for fork in sequence.forks
    ]


def _check(request_id: str, forks: Iterable[worker_pb2.Fork]) -> None:
    names = [request_id, *(fork.request_id for fork in forks)]
    if len(names) > MAX_ANSWERS:
        raise ValueError(
            f"request {request_id} has {len(names) - 1} forks; at most {MAX_ANSWERS - 1} are allowed"
        )
    for name in names:
        check_name("forks.request_id", name)
    if len(set(names)) < len(names) or not all(names):
        raise ValueError(f"request {request_id}: each fork needs a request id of its own")


def _first_token(output_ids: Iterable[int]) -> int | None:
    tokens = list(output_ids)
    if len(tokens) > 1:
        raise ValueError(f"{len(tokens)} outputs were given of a request with forks; at most 1 is allowed")
    return tokens[0] if tokens else None
