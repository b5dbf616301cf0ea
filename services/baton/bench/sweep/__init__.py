"""Looks for the settings of a ring with the highest goodput."""
