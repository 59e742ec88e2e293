"""The router's own cost: a decode worker that computes nothing, called directly and through a router process."""
