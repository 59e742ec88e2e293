"""Pure decisions and arithmetic: no I/O, no torch, no clock. The live system and the simulator call the same code."""
