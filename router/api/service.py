"""What every endpoint works with: one object for each router, made by its composition root."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pdserve.errors import RequestError
from pdserve.router.admission import Admission
from pdserve.router.config import RouterSettings
from pdserve.router.drain import Drain
from pdserve.router.fleet import Fleet
from pdserve.router.keys.key_ring import KeyRing
from pdserve.router.membership.directory import Directory
from pdserve.router.metrics import RouterMetrics
from pdserve.router.record import RecomputeWarning
from pdserve.router.timeline import TimelineStore
from pdserve.router.tracing.tracer import NullTracer, RequestTracer
from pdserve.router.watched_files import WatchedFiles
from pdserve.text.chat_template import ChatTemplate
from pdserve.text.message_format import MessageFormat
from pdserve.text.tokenizer import Tokenizer

T = TypeVar("T")

_INLINE_CHARACTERS = 4096
"""Texts up to this are tokenised on the event loop (about a millisecond); a thread would cost more than it saves."""


@dataclass(frozen=True)
class RouterService:
    """The parts of one router.

    Attributes:
        settings: all of them.
        model_name: the name in the API.
        tokenizer: the model's.
        chat_template: the model's.
        fleet: the instances.
        admission: lets requests in.
        metrics: counts.
        timelines: of the last requests.
        recompute_warning: the one that all requests share.
        message_format: how the model's answers are read.
        directory: lists the instances; None where they are given once.
        tracer: gets every request's timeline at its end.
        drain: whether the router still takes work.
        key_ring: the API keys; None = nobody needs one.
        watched_files: files that are read again while the router runs.
        created_s: when this router started, seconds since the epoch.
    """

    settings: RouterSettings
    model_name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    fleet: Fleet
    admission: Admission
    metrics: RouterMetrics
    timelines: TimelineStore
    recompute_warning: RecomputeWarning = field(default_factory=RecomputeWarning)
    message_format: MessageFormat = field(default_factory=MessageFormat)
    directory: Directory | None = None
    tracer: RequestTracer = field(default_factory=NullTracer)
    drain: Drain = field(default_factory=Drain)
    key_ring: KeyRing | None = None
    watched_files: Sequence[WatchedFiles] = ()
    created_s: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, model: str | None) -> None:
        """Refuse a model that is not served here; None stands for the one that is.

        Raises:
            RequestError: 404.
        """
        if model is not None and model != self.model_name:
            raise RequestError(
                f"the model {model[:200]!r} does not exist here; {self.model_name!r} does",
                param="model",
                code="model_not_found",
                http_status=404,
            )

    @property
    def system_fingerprint(self) -> str | None:
        """Names the model, its numerics and its layout; equal ones give equal answers for equal seeds."""
        identity = self.fleet.identity
        return None if identity is None else f"fp_{identity.fingerprint[:12]}"


async def run_tokenizer(function: Callable[[], T], num_characters: int) -> T:
    """Run ``function``; in a thread when the text is long, so that other streams go on meanwhile."""
    if num_characters <= _INLINE_CHARACTERS:
        return function()
    return await asyncio.to_thread(functools.partial(function))
