"""A worker without a model: the real scheduler, block pool, handoff and streams, with steps that take as long
as a profile says and tokens that follow from what lies in the KV pool.

It is for trying out what surrounds the workers (routers, charts, load tests) where there are no GPUs. All
that it says of itself is true of the simulation and of nothing else. Imports no torch.
"""
