"""Prompt in; lower-layer KV and deep states out. Never samples."""
