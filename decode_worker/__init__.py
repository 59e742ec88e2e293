"""KV in; tokens out. The authority on reservations."""
