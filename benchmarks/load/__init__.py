"""Load on a running service: requests of a seed or a trace, in a closed or an open loop, and what came of them."""
