"""Chaos on a real cluster: random requests, callers that leave, kills and transfer faults, and a verdict. See docs/chaos.md."""
