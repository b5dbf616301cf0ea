"""Sizes prefill and decode as one decision: `baton planner`."""
