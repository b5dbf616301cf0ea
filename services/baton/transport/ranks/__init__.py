"""Links between workers of several ranks: rank to rank, each with the heads and layers that both hold.

The handoff sees one link, whatever lies below. Here a link is a *bundle* of data connections, one for each
pair of ranks that have heads and layers in common. Rank 0 is the worker's own process; the other ranks'
processes run their own connectors over their own pools, and the worker tells them what to do. No rank's bytes
go through another.
"""
