"""The greeting that begins a stream: two services prove to each other that they have the cluster key."""
