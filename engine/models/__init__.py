"""Models of the Llama family: configuration, loading and the forward pass."""

from pdserve.engine.models.config import ModelConfig, load_config_file
from pdserve.engine.models.llama import CausalLM
from pdserve.engine.models.loader import load_model
from pdserve.kernels.decoder import LayerHook

__all__ = ["CausalLM", "LayerHook", "ModelConfig", "load_config_file", "load_model"]
