"""The composition root: builds the parts of each process and wires them."""
