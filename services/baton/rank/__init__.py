"""The program of a rank that does not lead: it does what its leader tells it (``python -m baton.rank``)."""
