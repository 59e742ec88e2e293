"""Published figures and measurements beside what the cost model gives for them, misses included."""
