"""The clients of a soak: what they ask, when they leave, and whether what they got is right."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx

from pdserve.engine import LLM, SamplingParams


@dataclass
class Visit:
    """One request, and what came of it."""

    index: int
    prompt: list[int]
    max_tokens: int
    temperature: float
    leaves_after: int | None
    text: str = ""
    num_events: int = 0
    outcome: str = "unfinished"
    error: str = ""

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.index, max_tokens=self.max_tokens)


def plan_visits(count: int) -> list[Visit]:
    rng = random.Random(11)
    shared = [[rng.randrange(100, 40000) for _ in range(400)] for _ in range(8)]
    visits = []
    for index in range(count):
        prompt = [rng.randrange(100, 40000) for _ in range(rng.choice((1, 7, 15, 16, 17, 32, 40, 90)))]
        if rng.random() < 0.4:
            prompt = rng.choice(shared)[: rng.randrange(1, 400)] + prompt
        leaves_after = rng.randrange(0, 8) if rng.random() < 0.2 else None
        visits.append(Visit(index, prompt, rng.choice((1, 2, 4, 8, 16)), rng.choice((0.0, 1.0)), leaves_after))
    return visits


async def pay_visit(client: httpx.AsyncClient, visit: Visit) -> None:
    body = {
        "prompt": visit.prompt,
        "max_tokens": visit.max_tokens,
        "temperature": visit.temperature,
        "seed": visit.index,
        "stream": True,
    }
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                visit.outcome = f"error {response.status_code} {error['code']}"
                visit.error = error["message"]
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    visit.outcome = f"error in stream {event['error']['code']}"
                    visit.error = event["error"]["message"]
                    return
                for choice in event["choices"]:
                    visit.text += choice["text"]
                    visit.num_events += 1
                    if choice["finish_reason"]:
                        visit.outcome = choice["finish_reason"]
                if visit.leaves_after is not None and visit.num_events > visit.leaves_after:
                    visit.outcome = "left"
                    return
    except httpx.HTTPError as error:
        visit.outcome = f"transport {type(error).__name__}"


async def run_clients(url: str, visits: list[Visit], num_clients: int, started: list[int]) -> None:
    queue = iter(visits)
    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def work() -> None:
            for visit in queue:
                started[0] += 1
                await pay_visit(client, visit)
                while visit.outcome.startswith("error 503"):  # what a client does: nothing was lost, ask again
                    await asyncio.sleep(0.25)
                    visit.error = ""
                    await pay_visit(client, visit)

        await asyncio.gather(*(work() for _ in range(num_clients)))


def check(visits: list[Visit], model: Path) -> Counter[str]:
    """Compare with one engine; counts of outcomes and of wrong answers."""
    engine = LLM(str(model), max_num_seqs=64, num_blocks=8192, max_num_batched_tokens=4096)
    counts: Counter[str] = Counter()
    for start in range(0, len(visits), 500):
        chunk = visits[start : start + 500]
        expected = engine.generate([v.prompt for v in chunk], [v.params for v in chunk], use_tqdm=False)
        for visit, answer in zip(chunk, expected, strict=True):
            whole = visit.outcome in ("stop", "length")
            is_right = visit.text == answer.text if whole else answer.text.startswith(visit.text)
            counts[visit.outcome] += 1
            counts["WRONG"] += not is_right or (whole and visit.outcome != answer.finish_reason)
    engine.close()
    return counts
