"""Measures the engine in this process. Imports torch."""
