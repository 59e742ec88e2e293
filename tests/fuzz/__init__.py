"""Hostile input for everything that reads what others write: the doors, the handoff, model files."""
