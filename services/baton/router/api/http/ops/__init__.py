"""Endpoints for operators: health, status, traces, the live figures."""
