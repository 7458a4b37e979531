"""Which instances belong to the pools: given once, in a file that is watched, or announced in Redis."""
