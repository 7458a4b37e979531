"""The legs of a request: what a prefill instance and a decode instance are sent, built in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from pdserve.protocol import AddRequest, KVTransferParams, Role, SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One choice of a client's request: parsed, tokenised and checked once.

    Attributes:
        request_id: the router's internal id, unique; a client's own id never leaves the router.
        prompt_token_ids: the prompt.
        sampling: with a seed, so that any instance draws the same tokens.
        deadline_s: event loop time at which the request ends with a timeout.
        priority: as in `AddRequest`.
        cache_salt: as in `AddRequest`.
        session_id: the client's X-Session-Id, for policies; no leg gets it.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    deadline_s: float
    priority: int = 0
    cache_salt: str = ""
    session_id: str = ""


@dataclass(slots=True)
class Progress:
    """How far a request has come; all that a next leg needs.

    Attributes:
        output_token_ids: every token that went on to the client, from whichever legs.
        kv_transfer_params: where the prompt's KV waits; None before the hand-off and once a leg has used it.
        num_legs: legs that were sent.
    """

    output_token_ids: list[int] = field(default_factory=list)
    kv_transfer_params: KVTransferParams | None = None
    num_legs: int = 0


def build_leg(request: GenerationRequest, progress: Progress, *, role: Role, now_s: float) -> AddRequest:
    """The message that starts the next leg.

    What each leg gets:

    =====================  ==========================  =================================================
    field                  prefill leg                 decode leg (also: all of a request; going on)
    =====================  ==========================  =================================================
    request_id             fresh for each leg          fresh for each leg
    prompt_token_ids       the prompt                  the prompt
    output_token_ids       none                        every token so far (none if decode does all of it)
    handoff                True: one token, then stop  False
    sampling.max_tokens    the client's                the client's: earlier tokens count
    sampling.seed          the request's               the request's: draws depend on seed and position only
    sampling.prompt_…      the client's                left out once there are tokens: the first leg sent them
    other sampling fields  the client's                the client's
    kv_transfer_params     none                        the prefill leg's, once
    priority, cache_salt   the client's                the client's
    timeout_s              what is left                what is left
    =====================  ==========================  =================================================

    Stop strings travel with ``sampling`` but are found where tokens become text; a client's own
    ``kv_transfer_params`` never come this far.
    """
    sampling = request.sampling
    if progress.output_token_ids and sampling.prompt_logprobs is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return AddRequest(
        request_id=f"{request.request_id}-{progress.num_legs}",
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=list(progress.output_token_ids),
        sampling=sampling,
        handoff=role is Role.PREFILL,
        kv_transfer_params=progress.kv_transfer_params if role is Role.DECODE else None,
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout_s=max(request.deadline_s - now_s, 0.001),
    )
