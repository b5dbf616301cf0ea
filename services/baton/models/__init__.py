"""Model families, their shared layers, and loading. ``config`` imports no torch; everything else does."""
