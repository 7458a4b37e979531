"""The grid of parameters: each is one request, and one that goes through every kind of leg."""

from __future__ import annotations

from typing import Any

from target import CHAT, COMPLETIONS

TEXT = "The old house stood on a hill above the river. Every evening its owner lit one lamp in the kitchen, and " * 2
SCHEMA = {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}}
EOS = 2
"""Of our own model; elsewhere one token among others."""

COMPLETION_GRID: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "nucleus": {"temperature": 1.2, "seed": 1, "top_p": 0.8, "top_k": 50, "min_p": 0.02},
    "one token": {"max_tokens": 1, "logprobs": 2},
    "two tokens": {"max_tokens": 2, "logprobs": 0},
    "default length": {"max_tokens": None},
    "three choices": {"n": 3, "seed": 5, "logprobs": 3},
    "best of two": {"n": 2, "best_of": 2, "seed": 5},
    "logprobs": {"logprobs": 5, "seed": 3},
    "echo": {"echo": True, "max_tokens": 3},
    "echo with logprobs": {"echo": True, "logprobs": 2, "n": 2, "seed": 4},
    "stop string": {"stop": [" the", ",", "."], "temperature": 0, "max_tokens": 12},
    "stop string shown": {"stop": "e", "include_stop_str_in_output": True, "max_tokens": 12},
    "stop token": {"stop_token_ids": list(range(200, 320)), "seed": 2, "max_tokens": 12},
    "first token ends it": {"logit_bias": {str(EOS): 100}, "logprobs": 1},
    "first token is a stop token": {"logit_bias": {"500": 100}, "stop_token_ids": [500]},
    "ignored end": {"logit_bias": {str(EOS): 100}, "ignore_eos": True, "max_tokens": 3},
    "end held back": {"logit_bias": {str(EOS): 100}, "min_tokens": 4, "logprobs": 1},
    "special tokens shown": {"logit_bias": {str(EOS): 100}, "ignore_eos": True, "skip_special_tokens": False},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "seed": 8},
    "several prompts": {"prompt": [TEXT, "Once upon a time", "1 2 3"], "n": 2, "seed": 6, "logprobs": 1},
    "token ids": {"prompt": [504, 253, 1116, 327, 260, 2101], "seed": 6},
    "lists of token ids": {"prompt": [[504, 253, 1116], [327, 260, 2101, 30]], "echo": True},
    "one token prompt": {"prompt": [504], "seed": 6},
    "whole blocks": {"prompt": list(range(1000, 1032)), "seed": 6},
    "json": {"response_format": {"type": "json_object"}, "max_tokens": 10, "logprobs": 1},
    "regex": {"structured_outputs": {"regex": "[a-f]{2,9}"}, "max_tokens": 10, "n": 2, "min_tokens": 3},
}
CHAT_GRID: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "completion tokens": {"max_tokens": None, "max_completion_tokens": 5, "seed": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 4, "seed": 3},
    "choices": {"n": 2, "seed": 9, "logprobs": True},
    "first token ends it": {"logit_bias": {str(EOS): 100}, "logprobs": True, "top_logprobs": 1},
    "stop string": {"stop": [" ", "!"], "max_tokens": 12, "seed": 1},
    "json schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "call": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60, "temperature": 0},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}], "seed": 1},
    "going on": {
        "messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2, 3,"}],
        "continue_final_message": True,
        "temperature": 0,
    },
}
NOT_STREAMED: dict[str, dict[str, Any]] = {
    "prompt logprobs": {"prompt_logprobs": 2, "seed": 1},
    "prompt logprobs of several": {"prompt": [TEXT, "Once upon a time"], "prompt_logprobs": 0, "echo": True},
}


def build_bodies() -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body of each cell."""
    bodies = {}
    for name, fields in {**COMPLETION_GRID, **NOT_STREAMED}.items():
        bodies[f"completions: {name}"] = (COMPLETIONS, {"prompt": TEXT, "max_tokens": 6, "seed": 11, **fields})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    for name, fields in CHAT_GRID.items():
        bodies[f"chat: {name}"] = (CHAT, {"messages": messages, "max_tokens": 6, "seed": 11, **fields})
    return bodies
