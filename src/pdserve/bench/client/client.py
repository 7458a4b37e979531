"""Sends one request and notes when each of its tokens came. Lives on one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import httpx
import msgspec

from pdserve import env
from pdserve.bench.client.answer import AnswerReader, describe_refusal
from pdserve.bench.client.settings import TargetSettings
from pdserve.bench.measure.samples import Failure, RequestSample
from pdserve.bench.workload.requests import BenchRequest

_CONNECT_TIMEOUT_S = 10.0


class BenchClient:
    """Talks to one server; use it in ``async with``.

    Args:
        url: the server's, without /v1.
        model: the name to ask for.
        target: how requests are written.
        transport: stands for the network in tests.
    """

    def __init__(
        self, url: str, model: str, target: TargetSettings, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._model = model
        self._target = target
        self._path = "/v1/chat/completions" if target.endpoint == "chat" else "/v1/completions"
        # One connection for each request under way; a proxy from the environment would be measured with the server.
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=build_headers(),
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
            transport=transport,
        )

    async def send(self, request: BenchRequest, sample: RequestSample, clock: Callable[[], float]) -> None:
        """Send ``request`` and read its answer into ``sample``; whatever goes wrong becomes its failure.

        Args:
            request: what to send.
            sample: a new one, with its times of sending set.
            clock: seconds since the run began.
        """
        try:
            async with asyncio.timeout(self._target.request_timeout_s):
                sample.failure = await self._exchange(request, sample, clock)
        except TimeoutError:
            sample.failure = Failure("timeout", f"no whole answer within {self._target.request_timeout_s:g} s")
        except httpx.ConnectError as error:
            sample.failure = Failure("connect", str(error) or "the connection was refused")
        except httpx.TimeoutException as error:
            sample.failure = Failure("connect", f"no connection within {_CONNECT_TIMEOUT_S:g} s: {error}")
        except httpx.HTTPError as error:
            num_events = len(sample.event_times_s)
            message = str(error) or type(error).__name__
            sample.failure = Failure("disconnected", f"the connection broke after {num_events} tokens: {message}")
        if sample.failure is not None:
            sample.end_s = clock()

    async def _exchange(
        self, request: BenchRequest, sample: RequestSample, clock: Callable[[], float]
    ) -> Failure | None:
        body = msgspec.json.encode(self.build_body(request))
        async with self._http.stream("POST", self._path, content=body) as response:
            if response.status_code != 200:
                return describe_refusal(response.status_code, await response.aread())
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                return Failure("not_a_stream", f"the answer's content type is {kind or 'missing'}")
            reader = AnswerReader(sample, request.max_tokens, is_full_length=self._target.ignore_eos)
            async for chunk in response.aiter_raw():
                failure = reader.take(chunk, clock())
                if failure is not None:
                    return failure
            return reader.finish()

    def build_body(self, request: BenchRequest) -> dict[str, Any]:
        """The JSON that is sent."""
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._target.endpoint == "chat":
            body["messages"] = request.messages or [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        if self._target.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **self._target.extra_body}

    async def __aenter__(self) -> BenchClient:
        """The client itself."""
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        await self._http.__aexit__(kind, error, trace)


def build_headers() -> Mapping[str, str]:
    """Headers of every request; compressed events would arrive in clumps, so none are asked for."""
    headers = {"content-type": "application/json", "accept": "text/event-stream", "accept-encoding": "identity"}
    api_key = env.get_api_key()
    return {**headers, "authorization": f"Bearer {api_key}"} if api_key else headers


def now_since(start_s: float) -> Callable[[], float]:
    """A clock that shows seconds since ``start_s`` of `time.perf_counter`."""
    return lambda: time.perf_counter() - start_s
