"""Kernels in Triton for GPUs, attention by flash-attn, decode steps as CUDA graphs.

Before a GPU is asked for, only `requirements` is imported from outside: Triton need not be there otherwise.

Rows don't depend on one another by construction. Each kernel has one compiled form for a model: what varies from step
to step (rows, lengths) is a runtime argument that Triton does not specialise on, every sum runs over its inputs in
tiles of one size from the first on, nothing is tuned by timing, and no sum is split by how busy the device is.
"""
