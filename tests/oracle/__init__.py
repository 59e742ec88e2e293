"""The independent program: design §2 written as masks over transformers' own layers. Shares no code with Shoal."""
