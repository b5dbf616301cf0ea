"""Whether the router's event loop runs, and its life sign to the workers while it does not."""
