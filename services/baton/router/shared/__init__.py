"""What the replicas of a router share: a tenant's use of its limits, and what is on its way to workers.

It is kept in Redis where a URL is given, and in this process otherwise. Whatever becomes of Redis, no request
waits for it for longer than the bound, and none fails because of it.
"""
