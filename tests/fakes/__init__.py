"""Protocol-true stand-ins for workers: real gRPC servers with scripted behaviour, no model."""
