"""A worker without a model: the real scheduler, block pool, handoff and streams, with steps that take as long
as a profile says and tokens that follow from the content of the KV pool.

The worker is for trying out what surrounds workers (routers, charts, load tests) where there are no GPUs.
What it reports is true of the simulation only. Imports no torch.
"""
