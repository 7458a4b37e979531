"""Offline generation with the real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.engine import LLM, SamplingParams
from pdserve.errors import ConfigError, ContextLengthError, RequestError
from pdserve.protocol import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=512, max_num_seqs=4) as llm:
        yield llm


def test_text_and_token_ids_give_the_same_and_order_is_kept(llm: LLM) -> None:
    texts = ["The capital of France is", "2 + 2 =", "def add(a, b):\n"]
    by_text = llm.generate(texts, GREEDY, use_tqdm=False)
    by_ids = llm.generate([c.prompt_token_ids for c in by_text], GREEDY, use_tqdm=False)
    assert [c.prompt for c in by_text] == texts
    assert [c.token_ids for c in by_text] == [c.token_ids for c in by_ids]
    assert "Paris" in by_text[0].text


def test_more_prompts_than_fit_at_once_all_finish(llm: LLM) -> None:
    found = llm.generate([[100 + i, 200, 300] for i in range(30)], GREEDY, use_tqdm=False)
    assert len(found) == 30
    assert all(c.finish_reason is not None for c in found)
    assert llm.core.get_load().num_used_blocks == 0


def test_progress_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capsys.readouterr().err


def test_stop_string_ends_text_and_frees_the_request(llm: LLM) -> None:
    (free,) = llm.generate("Count: 1, 2, 3,", SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    stop = free.text[6:9]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=(stop,))
    (stopped,) = llm.generate("Count: 1, 2, 3,", params, use_tqdm=False)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason is FinishReason.STOP
    assert llm.core.get_load().num_used_blocks == 0


def test_logprobs_come_for_every_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5, prompt_logprobs=2, ignore_eos=True)
    (answer,) = llm.generate("The quick brown fox", params, use_tqdm=False)
    assert answer.logprobs is not None
    assert answer.prompt_logprobs is not None
    assert [e.token_id for e in answer.logprobs] == answer.token_ids
    assert all(e.rank == 1 and e.top_ids[0] == e.token_id and len(e.top_ids) == 5 for e in answer.logprobs)
    assert [e.token_id for e in answer.prompt_logprobs] == answer.prompt_token_ids[1:]


def test_prompt_logprobs_do_not_depend_on_chunks_or_on_what_is_cached(llm: LLM) -> None:
    prompt = list(range(1000, 1100))
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3)
    llm.generate([prompt], GREEDY, use_tqdm=False)
    (warm,) = llm.generate([prompt], params, use_tqdm=False)
    with LLM(num_blocks=64, max_num_batched_tokens=7, max_queue_len=1) as chunked:
        cold, shortest = chunked.generate([prompt, [1000]], params, use_tqdm=False)
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert len(warm.prompt_logprobs or []) == 99
    assert shortest.prompt_logprobs == []  # asked for, and there is nothing to tell of the first token


def test_seed_fixes_the_answer_and_its_absence_does_not(llm: LLM) -> None:
    def ask(seed: int | None) -> list[int]:
        params = SamplingParams(temperature=1.5, max_tokens=16, seed=seed)
        return llm.generate("Once upon a time", params, use_tqdm=False)[0].token_ids

    assert ask(5) == ask(5)
    assert ask(None) != ask(None)


def test_mistakes_are_named_and_nothing_is_generated(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["fine", ""], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="top_p"):
        llm.generate("x", SamplingParams(top_p=3.0), use_tqdm=False)
    with pytest.raises(ContextLengthError, match="9000 tokens"):
        llm.generate([[1] * 9000], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate("x", [GREEDY, GREEDY], use_tqdm=False)
    with pytest.raises(ConfigError, match="modle"):
        LLM(modle="x")
    with pytest.raises(ConfigError, match="block_size is 7; it must be a power of two"):
        LLM("smollm2-135m-instruct", block_size=7)
    with pytest.raises(ConfigError, match="/nowhere"):
        LLM("/nowhere")
    corrupt = tmp_path / "broken.gguf"
    corrupt.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=r"broken\.gguf"):
        LLM(str(corrupt))
    assert llm.core.get_load().num_running == 0
