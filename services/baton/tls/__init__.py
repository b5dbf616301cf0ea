"""TLS of all services: which files, and credentials that follow them when they change."""
