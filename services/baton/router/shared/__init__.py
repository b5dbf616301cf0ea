"""The state that replicas of a router share: each tenant's use of its limits, and the load on its way to
workers.

The state is kept in Redis if a URL is given, and in this process otherwise. Whatever happens to Redis, no
request waits for it longer than the bound, and no request fails because of it.
"""
