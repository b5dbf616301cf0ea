"""Moving KV blocks from prefill to decode: the handoff's state machines and the transports under them.

``messages``, ``prefill`` and ``decode`` are the protocol: pure, without I/O, clocks or threads. ``transport``
is the narrow interface of a connector; ``tcp`` implements it with the standard library. This package imports
neither torch nor the engine.
"""
