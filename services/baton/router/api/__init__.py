"""The core behind every client protocol: from a prepared request to the deltas of its answer."""
