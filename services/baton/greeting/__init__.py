"""How a stream between two services begins: each proves to the other that it has the cluster key."""
