"""The parts of a request that all processes share: sampling parameters, priority, log-probabilities, block
digests."""
