"""Measures a server over HTTP, or the engine in one process, and looks for the settings that suit a load.

Only ``bench.offline`` imports the engine; the rest runs where there is no torch.
"""
