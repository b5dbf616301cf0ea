"""The gRPC API: the same completion core as HTTP, with the same limits and messages."""
