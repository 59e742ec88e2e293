"""gRPC plumbing: server and channel factories, the error table, deadlines, health."""
