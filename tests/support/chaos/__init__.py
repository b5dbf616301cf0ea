"""Chaos on rings of real processes: a load with known answers, faults that prove they took effect, and
what must hold whatever happens. ``python -m loadtest.chaos`` runs it at length, tests/e2e/test_chaos.py in
short."""
