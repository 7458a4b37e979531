"""Supervises the processes of one machine: starts, watches, restarts and ends them, and leaves nothing behind.

Three guards see to the last: `up` ends its children in order when it may; each child asks the kernel for a
signal when `up` dies (`child`); and a small process (`janitor`) that notices `up`'s death in any form kills what
is left and removes the run directory.
"""
