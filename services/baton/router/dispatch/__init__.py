"""The dispatch of requests to workers and of their tokens back, in as many attempts as it takes."""
