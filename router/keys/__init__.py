"""API keys: what one is, the list of those that are valid, and following that list while it changes."""
