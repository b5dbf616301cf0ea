"""The connectors, which move the bytes of KV blocks between workers.

``base`` is the narrow interface of a connector; ``tcp`` implements it with the standard library, ``ucx`` with
UCX, ``nixl`` with NIXL, ``torch_group`` with torch process groups; ``registry`` says which connectors a
worker has. This package imports no engine, and imports torch, ucxx and NIXL only when a connector that needs
them is made.
"""
