"""Kernels for CPUs in C++: built by the machine's own compiler when they are first needed, and kept."""
