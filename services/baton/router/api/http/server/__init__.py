"""HTTP itself: connections, bodies, authentication and errors, the same for every protocol."""
