"""A hand-off without models: what connectors take to bring KV from one process's memory into another's."""
