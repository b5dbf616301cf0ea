"""Measurements of running rings. Each module prints a table; ratios within one run are what counts."""
