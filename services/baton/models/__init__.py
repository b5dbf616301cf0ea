"""Model families, their shared layers, and loading.

``config`` and what it imports (``registry`` above all, the list of families) import no torch; everything else
does.
"""
