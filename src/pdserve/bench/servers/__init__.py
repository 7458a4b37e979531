"""Servers that a benchmark starts itself, one at a time, on cores of its choice."""
