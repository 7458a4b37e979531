"""A whole model in Triton, in its interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import Session, build_reference, save

from pdserve.engine.models import load_model

pytest.importorskip("triton", reason="Triton is not installed: pdserve[gpu]")

from pdserve.kernels.gpu.triton_backend import TritonBackend

TOKENS = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(5))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_float32_logits_agree_with_transformers_in_any_chunks(tmp_path: Path) -> None:
    reference = build_reference("qwen3")
    model = load_model(save(reference, tmp_path), torch.float32, TritonBackend(torch.float32, DEVICE))
    with torch.no_grad():
        expected = reference(TOKENS[None]).logits[0]
    session = Session(model, torch.float32)
    whole = session.run_chunks(TOKENS, 40)
    torch.testing.assert_close(whole.cpu(), expected, atol=2e-4, rtol=1e-4)
    assert torch.equal(Session(model, torch.float32, seed=1).run_chunks(TOKENS, 16), whole)
    assert torch.equal(session.run(TOKENS, 39, 40), whole[39:])
