"""The front door: gRPC in, two worker legs out. Knows no KV, no torch, no Ray."""
