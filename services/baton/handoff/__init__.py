"""The handoff of KV blocks from prefill to decode: the protocol, pure.

``messages``, ``prefill`` and ``decode`` have no I/O, no clocks and no threads: messages in, actions out.
``baton.roles`` executes the actions, and ``baton.transport`` moves the bytes.
"""
