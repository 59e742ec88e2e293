"""Measures running workers through the public API and fits a profile to them. Needs no torch and no access to the workers."""
