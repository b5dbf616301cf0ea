"""Triton kernels for CUDA tensors. Importing this package needs triton; nothing outside imports it at the top."""
