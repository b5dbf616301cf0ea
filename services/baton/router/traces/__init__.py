"""Traces of requests: where the time of each request went, kept while it runs and for a while after."""
