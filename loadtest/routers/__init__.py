"""Routers under load, before simulated workers."""
