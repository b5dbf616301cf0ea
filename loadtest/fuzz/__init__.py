"""A real ring under schemathesis and under random gRPC frames: inputs that strangers may send."""
