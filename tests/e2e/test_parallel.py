"""Engines of several worker processes: the tokens of one process, together, after a hand-off, and to the end of any."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pd_pair import Alone, Answer, PDPair, build_core
from processes import ManagedProcess, wait_until

sys.path.insert(0, str(Path(__file__).parent.parent / "soak"))

from tiny_model import build_tiny_model

from pdserve.engine.config import build_config
from pdserve.engine.core import EngineCore
from pdserve.errors import ConfigError, EngineError
from pdserve.protocol import AddRequest, Role, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=7, max_tokens=12, logprobs=3, prompt_logprobs=1, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.3, ignore_eos=True)
PARAMS = (GREEDY, SEEDED, PENALISED)
PROMPT = list(range(100, 140))
SMALL: dict[str, Any] = {"num_blocks": 64, "max_num_batched_tokens": 48}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(prompt_ids: list[list[int]]) -> list[list[int]]:
    """Three, of which one takes several steps."""
    return [prompt_ids[0], prompt_ids[1], (prompt_ids[2] * 40)[:150]]


def get_choices(answers: Sequence[Answer]) -> list[object]:
    return [(answer.token_ids, answer.logprobs, answer.finish_reason) for answer in answers]


def generate_alone(prompts: Sequence[Sequence[int]], **settings: Any) -> list[object]:
    engine = Alone(**{**SMALL, **settings})
    try:
        return get_choices(engine.generate(prompts, PARAMS))
    finally:
        engine.close()


def find_workers(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return [child for child, command in commands.items() if b"pdserve.engine.parallel.worker_process" in command]


def settle(core: EngineCore) -> None:
    """Step until there is nothing to do."""

    def is_settled() -> bool:
        core.step()
        return not core.has_work() and not core.has_transfers()

    wait_until(is_settled, "an end of work and transfers")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_three_ranks_of_a_real_model_give_the_tokens_of_one(prompts: list[list[int]]) -> None:
    assert generate_alone(prompts, tensor_parallel_size=3) == generate_alone(prompts)


def test_shares_and_stages_together_give_the_tokens_of_one(model: Path, prompts: list[list[int]]) -> None:
    settings: dict[str, Any] = {"model": str(model), "dtype": "float32"}
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert generate_alone(prompts, **settings, **ranks) == generate_alone(prompts, **settings)


def test_a_hand_off_between_engines_of_two_ranks_changes_nothing(
    model: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    store = {"connector": "shared_storage", "connector_options": {"path": str(tmp_path)}}
    pair = PDPair(**SMALL, **store, model=str(model), tensor_parallel_size=2)
    try:
        answers = pair.generate(prompts, PARAMS)
        pair.settle()
        assert get_choices(answers) == generate_alone(prompts, model=str(model))
        assert [answer.num_external_tokens for answer in answers] == [len(prompt) for prompt in prompts]
        assert pair.num_used_blocks == 0
    finally:
        pair.close()


def test_workers_wake_the_engine_and_a_lost_one_ends_it_and_the_others(model: Path, tmp_path: Path) -> None:
    woken = threading.Event()
    store = {"connector": "shared_storage", "connector_options": {"path": str(tmp_path)}}
    config = build_config(model=str(model), **SMALL, **store, tensor_parallel_size=2)
    core = EngineCore.build(config, role=Role.PREFILL, engine_id="prefill", wake_up=woken.set)
    try:
        workers = find_workers(os.getpid())
        assert len(workers) == 2
        core.add_request(AddRequest(request_id="a", prompt_token_ids=PROMPT, sampling=GREEDY, handoff=True))
        settle(core)
        core.reset_prefix_cache()
        woken.clear()
        core.add_request(AddRequest(request_id="b", prompt_token_ids=PROMPT, sampling=GREEDY, handoff=True))
        core.step()
        assert woken.wait(30), "nobody said that the blocks are loaded"
        settle(core)
        woken.clear()
        os.kill(workers[1], signal.SIGKILL)
        assert woken.wait(30), "nobody said that a worker has ended"
        assert core.has_transfers()
        with pytest.raises(EngineError, match=r"have ended: .*tp1of2-pp0of1 \(killed by signal 9\)"):
            core.step()
    finally:
        core.close()
    assert not any(is_running(worker) for worker in workers)


def test_workers_end_with_their_engine_and_an_engine_with_its_workers(model: Path, tmp_path: Path) -> None:
    options = ["--model", str(model), "--num-blocks", "64", "--connector", "null", "--pipeline-parallel-size", "2"]
    instance = ManagedProcess("decode", ["pdserve.decode.main", *options], tmp_path)
    instance.start()
    try:
        instance.wait_ready()
        assert instance.process is not None
        workers = find_workers(instance.process.pid)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        assert instance.process.wait(30) == 1
        assert not any(is_running(worker) for worker in workers)
        assert "tp0of1-pp0of2 (killed by signal 9)" in instance.log.read_text()
        instance.start()
        instance.wait_ready()
        workers = find_workers(instance.process.pid)
        assert len(workers) == 2
        instance.kill()
        wait_until(lambda: not any(is_running(worker) for worker in workers), "the end of the workers")
    finally:
        instance.kill()


def test_a_worker_that_hangs_ends_the_engine_when_a_step_needs_it(model: Path) -> None:
    core = build_core(model=str(model), **SMALL, pipeline_parallel_size=2, worker_timeout_s=1.0)
    try:
        workers = find_workers(os.getpid())
        core.add_request(AddRequest(request_id="a", prompt_token_ids=PROMPT, sampling=GREEDY))
        os.kill(workers[1], signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"have not answered for 1 s: .*tp0of1-pp1of2"):
            core.step()
    finally:
        core.close()
    assert not any(is_running(worker) for worker in workers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tensor_parallel_size": 4},
            "tensor_parallel_size 4 does not divide this model's 2 KV heads; it can be 1 or 2",
        ),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size 3 is more than this model's 2 layers"),
        ({"tensor_parallel_size": 2, "device": "cuda"}, "compute on device cpu only, not on cuda"),
        ({"tensor_parallel_size": 2, "kernel_backend": "triton"}, "kernel backend 'triton' computes on a GPU"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(model: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_core(model=str(model), **SMALL, **settings)
    assert not find_workers(os.getpid())
