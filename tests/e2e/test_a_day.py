"""A day in its life: two prefill and two decode instances, 16 busy clients, a third of whom leave at random, and
one instance of each kind killed under way and restarted on its port."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from pd_pair import Alone
from processes import Deployment, wait_until
from prompts import PROMPTS, build_long_text

from pdserve.protocol import SamplingParams
from pdserve.text import Tokenizer

NUM_REQUESTS = 200
NUM_CLIENTS = 16
MAX_TOKENS = 24
MODEL = "smollm2-135m-instruct"


@dataclass
class Visit:
    """One request, and what came of it."""

    index: int
    prompt: list[int]
    temperature: float
    leaves_after: int | None
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.index, max_tokens=MAX_TOKENS)


def plan_visits(tokenizer: Tokenizer) -> list[Visit]:
    rng = random.Random(20261129)
    long_ids = tokenizer.encode(build_long_text(12), add_special_tokens=True)
    visits = []
    for index in range(NUM_REQUESTS):
        ids = tokenizer.encode(rng.choice(PROMPTS), add_special_tokens=True)
        if index % 10 == 0:
            ids = long_ids[: rng.randrange(100, 600)] + ids
        leaves_after = rng.randrange(0, MAX_TOKENS) if rng.random() < 1 / 3 else None
        visits.append(Visit(index, ids, rng.choice((0.0, 0.8)), leaves_after))
    return visits


def pay_visit(client: openai.OpenAI, visit: Visit) -> None:
    """Stream one completion; leave early where planned."""
    num_chunks = 0
    try:
        stream = client.completions.create(
            model=MODEL,
            prompt=visit.prompt,
            max_tokens=MAX_TOKENS,
            temperature=visit.temperature,
            seed=visit.index,
            stream=True,
        )
        with stream:
            for chunk in stream:
                num_chunks += 1
                for choice in chunk.choices:
                    visit.text += choice.text
                    visit.finish_reason = choice.finish_reason or visit.finish_reason
                if visit.leaves_after is not None and num_chunks > visit.leaves_after:
                    return
    except openai.APIError as error:
        visit.error = str(error)


def run_clients(url: str, visits: list[Visit]) -> tuple[list[threading.Thread], list[Visit]]:
    """Start the clients; threads, and the list that fills with finished visits."""
    todo, done, lock = list(visits), [], threading.Lock()

    def work() -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        with client:
            while True:
                with lock:
                    if not todo:
                        return
                    visit = todo.pop(0)
                pay_visit(client, visit)
                with lock:
                    done.append(visit)

    threads = [threading.Thread(target=work) for _ in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    return threads, done


@pytest.mark.timeout(600)
def test_a_day(tmp_path: Path, tokenizer: Tokenizer) -> None:
    visits = plan_visits(tokenizer)
    with Deployment(tmp_path, num_prefill=2, num_decode=2) as deployment:
        threads, done = run_clients(deployment.url, visits)
        for share, victim in ((0.25, deployment.prefill[0]), (0.5, deployment.decode[0])):
            wait_until(lambda s=share: len(done) >= s * NUM_REQUESTS, f"{share:.0%} of the requests", 200)
            victim.kill()
            time.sleep(1.0)  # the day goes on without it for a while
            victim.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive(), "a client hangs"
        for instance in (deployment.prefill[0], deployment.decode[0]):
            instance.wait_ready()
        deployment.wait_idle()
        assert [i.num_starts for i in deployment.instances] == [2, 1, 2, 1]
        assert all(i.is_alive for i in deployment.instances), "an engine died"
        assert deployment.router.is_alive
        statuses = deployment.stop()
        assert statuses == dict.fromkeys(statuses, 0)

    stayed = [visit for visit in done if visit.leaves_after is None]
    assert len(done) == NUM_REQUESTS
    assert len(stayed) > NUM_REQUESTS / 2
    failed = [visit for visit in stayed if visit.error is not None]
    assert len(failed) <= 2, [visit.error for visit in failed]
    compare_with_one_engine(done, tokenizer)


def compare_with_one_engine(done: list[Visit], tokenizer: Tokenizer) -> None:
    """Those who stayed got the whole answer; those who left, a beginning of it."""
    engine = Alone(max_num_seqs=32, num_blocks=4096)
    expected = engine.generate([visit.prompt for visit in done], [visit.params for visit in done])
    engine.close()
    for visit, answer in zip(done, expected, strict=True):
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        if visit.error is not None or visit.leaves_after is not None:
            assert text.startswith(visit.text), f"visit {visit.index} got other tokens"
        else:
            assert visit.text == text, f"visit {visit.index} got other tokens"
            assert visit.finish_reason == str(answer.finish_reason)
