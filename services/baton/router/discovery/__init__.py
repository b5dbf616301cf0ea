"""Discovery of workers: from a fixed list, or from the EndpointSlices of a Kubernetes namespace."""
