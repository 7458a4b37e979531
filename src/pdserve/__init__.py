"""pdserve: a disaggregated prefill/decode service for language models."""

__version__ = "0.1.0"
