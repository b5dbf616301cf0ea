"""Speculative decoding: drafts of the tokens that come next, so that one step can settle several of them."""
