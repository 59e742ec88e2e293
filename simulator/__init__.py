"""Capacity planning on the decision code of the live system."""
