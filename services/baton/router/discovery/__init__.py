"""Who is a worker: a fixed list, or what the EndpointSlices of a Kubernetes namespace say."""
