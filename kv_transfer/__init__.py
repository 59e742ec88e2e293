"""The handoff between a prefill and a decode worker: the only room that knows both ends."""
