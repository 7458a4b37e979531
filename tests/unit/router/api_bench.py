"""The whole application over fake instances, driven without a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from typing import Any

import httpx
from fake_instances import FakeInstance, build_bench, run

from pdserve.checkpoint import prepare_tokenizer, resolve_model
from pdserve.router.admission import Admission
from pdserve.router.api.app import build_app
from pdserve.router.api.service import RouterService
from pdserve.router.config import AdmissionSettings, HandoffSettings, HttpSettings, RouterSettings
from pdserve.router.keys.key_ring import KeyRing
from pdserve.router.timeline import TimelineStore
from pdserve.text import ChatTemplate, Tokenizer, load_tokenizer
from pdserve.text.message_format import MessageFormat

MODEL = "smollm2-135m-instruct"
SETTINGS = RouterSettings(
    http=HttpSettings(max_body_bytes=20_000),
    handoff=HandoffSettings(prefill_wait_s=0.0, failover_wait_s=0.05),
    admission=AdmissionSettings(max_choices=8, timeline_capacity=4),
)


@cache
def load_text() -> tuple[Tokenizer, ChatTemplate]:
    directory = prepare_tokenizer(resolve_model(MODEL))
    tokenizer = load_tokenizer(directory)
    return tokenizer, ChatTemplate(directory, tokenizer)


def with_client(
    test: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]],
    *,
    prefill: Sequence[FakeInstance] = (),
    decode: Sequence[FakeInstance] = (),
    settings: RouterSettings = SETTINGS,
    key_ring: KeyRing | None = None,
    message_format: MessageFormat | None = None,
) -> Any:
    """Run ``test`` with a client of a router over these instances."""

    async def main() -> Any:
        tokenizer, chat_template = load_text()
        async with build_bench(prefill, decode) as bench:
            service = RouterService(
                settings=settings,
                model_name=MODEL,
                tokenizer=tokenizer,
                chat_template=chat_template,
                fleet=bench.fleet,
                admission=Admission(settings.admission, bench.metrics),
                metrics=bench.metrics,
                timelines=TimelineStore(settings.admission.timeline_capacity),
                message_format=message_format or MessageFormat(),
                key_ring=key_ring,
            )
            transport = httpx.ASGITransport(build_app(service), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                return await test(client)

    return run(main())


def read_events(text: str) -> list[Any]:
    """The values of an event stream; its last line must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
