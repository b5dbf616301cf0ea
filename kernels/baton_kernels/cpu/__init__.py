"""Kernels for CPUs in C++, built by the machine's own compiler at the first use, and kept."""
