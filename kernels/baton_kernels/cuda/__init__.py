"""Triton kernels for CUDA tensors. Importing them needs triton, which is only there where CUDA is."""
