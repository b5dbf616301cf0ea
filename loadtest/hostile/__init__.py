"""Attacks on a ring of real processes, in which honest tenants stream."""
