"""Measurements that users can re-run. Everything prints what it measured, on what, and the spread."""
