"""Workloads: prompts, lengths of answers and, from traces, the times of requests."""
