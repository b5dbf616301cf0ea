"""Links between workers of several ranks: rank to rank, each with the heads and layers that both hold.

To the handoff a link is one thing, whatever lies below. Here it is a *bundle* of data connections, one for
each pair of ranks that have something in common. Rank 0 is the worker's own process; the other ranks'
processes run their own connectors over their own pools, and the worker tells them what to do. No rank's
bytes go through another.
"""
