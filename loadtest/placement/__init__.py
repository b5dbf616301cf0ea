"""Placement in simulation, with the policy and the index that ship: ``python -m loadtest.placement``."""
