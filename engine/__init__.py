"""Model execution shared by both workers: layers, attention, weights, sampler, KV tensors."""
