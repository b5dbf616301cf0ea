"""gRPC, TLS and sockets for all services."""
