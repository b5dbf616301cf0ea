"""The program of a rank that does not lead: it serves its leader (``python -m baton.rank``)."""
