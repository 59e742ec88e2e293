"""A simulated cluster: the live system's decisions (placement/) driven by events instead of a clock."""
