"""What strangers may send: a real ring under schemathesis and under random gRPC frames."""
