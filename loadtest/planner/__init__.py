"""A day of a ring whose pods come and go, in simulation: ``python -m loadtest.planner``."""
