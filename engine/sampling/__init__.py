"""Choosing tokens from logits: stateless, one row at a time, the same for any batch."""
