"""Requests to simulate: from traces, or drawn from distributions. Counts and times only, never text or token ids."""
