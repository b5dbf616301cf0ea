"""Measurements of running rings. Each module prints a table; only ratios within one run are comparable."""
