"""Shoal serves decoder-only language models with shallow prefill and deep decode."""

__version__ = "0.1.0"
