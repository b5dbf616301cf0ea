"""A worker whose ranks are on several nodes: how the other nodes join the leader, and end with it.

A *node* here is a process on a machine, or in a pod, of its own. Node 0 leads: it is the worker. Each of the
others runs ``baton node`` (``node``), which joins the leader (``leader``), gets the model to load, and starts
the node's ranks. Each rank has its own connections to the leader, like a child process of the leader. The
rest between a node and the leader is a session: heartbeats both ways, and the end.
"""
