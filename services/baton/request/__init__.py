"""What a request asks, checked: the same ranges, limits and messages for every way in.

The router's protocols and the offline `LLM` resolve here. Imports no torch.
"""
