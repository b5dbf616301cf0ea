"""The watch over the router's event loop, and the beats to workers while the loop does not run."""
