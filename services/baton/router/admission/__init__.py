"""Admission into the ring: how many requests at once, in which order, and which are refused."""
