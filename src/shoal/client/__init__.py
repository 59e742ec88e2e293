"""The Python client of the public API."""
