"""Where a model lives on disk and what its files say: configuration, tokenizer, licence. No torch."""
