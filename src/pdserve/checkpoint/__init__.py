"""From what a user writes after ``--model`` to files that an engine and a tokenizer can load.

Knows files and formats; knows nothing of tensors' use, of torch or of serving. The way of a model::

    resolve_model(text) -> ModelSource      a Hugging Face directory or a GGUF file, and its name
    prepare_tokenizer(source) -> Path       tokenizer.json, tokenizer_config.json, config.json: all a router needs
    prepare_weights(source, dtype) -> Path  the same and safetensors; a GGUF file is converted once and cached
    weight_files, weights_digest, architecture_digest: what the engine loads and what identifies it
"""

from pdserve.checkpoint.digests import architecture_digest, weights_digest
from pdserve.checkpoint.prepare import prepare_tokenizer, prepare_weights
from pdserve.checkpoint.source import ModelKind, ModelSource, resolve_model
from pdserve.checkpoint.weight_files import weight_files

__all__ = [
    "ModelKind",
    "ModelSource",
    "architecture_digest",
    "prepare_tokenizer",
    "prepare_weights",
    "resolve_model",
    "weight_files",
    "weights_digest",
]
