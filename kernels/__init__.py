"""Attention and the other kernels of a forward pass, behind one backend interface."""
