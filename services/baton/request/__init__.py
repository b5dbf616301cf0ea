"""The checks of a request: the same ranges, limits and messages for every protocol.

The router's protocols and the offline `LLM` resolve their requests here. Imports no torch.
"""
