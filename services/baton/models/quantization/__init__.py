"""The forms in which weights of matmuls are kept: schemes that a ``Linear`` allocates, loads, packs and
multiplies with.

``base`` defines the interface of a scheme, ``registry`` lists the schemes. Only ``registry`` and
``experts_format`` import no torch.
"""
