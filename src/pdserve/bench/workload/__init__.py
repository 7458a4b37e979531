"""Which requests a benchmark sends, and when."""
