"""The search for the cheapest cluster that meets its targets: bounds prune, simulation decides."""
