"""Letting requests into the ring: how many at once, in whose turn, and who is told to come back later."""
