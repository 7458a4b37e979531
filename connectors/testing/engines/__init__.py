"""Real engines around the connector under test: a tiny random model, a prefill and a decode engine in one process.

The only part of the connectors' packages that knows the engine: it is a test of both, and nothing imports it but checks
of level 3 when they run.
"""
