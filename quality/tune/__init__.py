"""Tunes LoRA adapters under the exact serving visibility: what `shoal tune` runs. Serving them is the engine's business."""
