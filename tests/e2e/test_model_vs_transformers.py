"""The real model in float32 against transformers: the same greedy tokens, the same logits.

Ours answers all prompts in one batch. transformers reads each prompt with our answer behind it, once: its choices
equal ours at every position exactly if its own greedy answer is the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from pdserve.checkpoint import prepare_weights, resolve_model
from pdserve.engine.models import CausalLM, load_model
from pdserve.kernels.base import AttentionMetadata
from pdserve.kernels.registry import get_backend

NUM_NEW_TOKENS = 64
BLOCK_SIZE = 16
MAX_LOGIT_DIFFERENCE = 1e-3

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain to a ten year old why the sky is blue.",
    "Give me three ideas for a birthday present for my father, who likes fishing.",
    "Translate into German: the train to Hamburg leaves at 18:05 from platform 7.",
    "How many days are there in 2,024? And in 1900?",
    "日本の首都はどこですか。簡単に説明してください。",
    "请用中文介绍一下长城的历史。",
    "Напиши короткое стихотворение о море.",
    "What do these emoji say together? 🚀🌕👩‍🚀🎉",
    "My laptop doesn't turn on any more. What should I check first, second and third?",
)
TEXTS = (
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "SELECT name, COUNT(*) AS orders FROM customers JOIN orders ON",
    "Once upon a time, in a village at the foot of a mountain, there lived a",
    "The three laws of thermodynamics are:\n\n1.",
    "| country | capital |\n|---|---|\n| Spain | Madrid |\n| Italy |",
    "import numpy as np\n\nx = np.linspace(0, 1, 100)\n",
    "Call me Ishmael. Some years ago, never mind how long precisely,",
    "Q: What is 17 + 25?\nA: 42\nQ: What is 8 * 7?\nA:",
    "To be, or not to be, that is the question: " * 20,
)


@pytest.fixture(scope="module")
def directory() -> Path:
    return prepare_weights(resolve_model("smollm2-135m-instruct"), "float32")


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in (*chats, *TEXTS)]


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def answer(model: CausalLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy answers to all prompts at once, and the logits [64, V] each token was chosen by."""
    config = model.config
    counts = [-(-(len(prompt) + NUM_NEW_TOKENS) // BLOCK_SIZE) for prompt in prompts]
    shape = (sum(counts), config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    kv_cache = torch.full(shape, float("nan"))
    starts = [sum(counts[:r]) for r in range(len(counts))]
    block_ids = [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    texts, new_tokens = [list(prompt) for prompt in prompts], prompts
    steps: list[Tensor] = []
    for _ in range(NUM_NEW_TOKENS):
        metadata = AttentionMetadata.build(
            [len(tokens) for tokens in new_tokens], [len(text) for text in texts], block_ids, BLOCK_SIZE
        )
        hidden = model.forward(torch.tensor([token for tokens in new_tokens for token in tokens]), metadata, kv_cache)
        last_rows = torch.tensor(metadata.query_start_loc[1:]) - 1
        steps.append(model.compute_logits(hidden[last_rows]))
        new_tokens = [[int(token)] for token in steps[-1].argmax(-1)]
        for text, tokens in zip(texts, new_tokens, strict=True):
            text += tokens
    logits = list(torch.stack(steps, dim=1))
    return [text[-NUM_NEW_TOKENS:] for text in texts], logits


def test_greedy_tokens_and_logits_equal_transformers(directory: Path, prompts: list[list[int]], reference: Any) -> None:
    assert len(prompts) == 20
    model = load_model(directory, torch.float32, get_backend("auto", torch.float32))
    answers, logits = answer(model, prompts)
    for prompt, tokens, ours in zip(prompts, answers, logits, strict=True):
        with torch.no_grad():
            read = torch.tensor([prompt + tokens[:-1]])
            theirs = reference(read, logits_to_keep=NUM_NEW_TOKENS).logits[0]
        assert tokens == theirs.argmax(-1).tolist()
        assert (ours - theirs).abs().max() < MAX_LOGIT_DIFFERENCE
