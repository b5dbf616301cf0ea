"""A worker whose ranks are on several nodes: how the others join the one that leads, and end with it.

A *node* here is a process on a machine, or in a pod, of its own. Node 0 leads: it is the worker. On each of
the others ``baton node`` runs (``node``). It joins the leader (``leader``), is told what to load, and starts
its ranks, each of which has its own connections to the leader, as if it were a child of it. What is left
between the two is a session: signs of life both ways, and how things end.
"""
