"""A CUDA device that is not there, for tests of code that runs on one: see ``device.FakeCuda``."""
