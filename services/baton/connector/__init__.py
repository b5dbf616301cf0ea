"""Moving KV blocks from prefill to decode: the handoff's state machines and the transports under them.

``messages``, ``prefill`` and ``decode`` are the protocol: pure, without I/O, clocks or threads. ``transport``
is the narrow interface of a connector; ``tcp`` implements it with the standard library, ``ucx`` with UCX,
``group`` with torch's process groups; ``choice`` says which a worker has. This package imports no engine, and
torch and ucxx only when a connector that needs them is made.
"""
