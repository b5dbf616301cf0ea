"""Metric names, defined once for all services."""
