"""Ranges of requests: each wrong value is named, each edge is taken."""

from __future__ import annotations

import math

import msgspec
import pytest

from pdserve.errors import ContextLengthError, RequestError
from pdserve.protocol import AddRequest, InstanceLimits, SamplingParams
from pdserve.request_checks import check_length, check_request, check_sampling

LIMITS = InstanceLimits(max_model_len=32, max_num_seqs=4, max_queue_len=4, num_blocks=8, vocab_size=100, max_logprobs=5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -2),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("top_k", 10**400),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("max_tokens", 2**63),
        ("min_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("logprobs", 6),
        ("logprobs", -1),
        ("prompt_logprobs", 6),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple([1] * 129)),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("stop", ("a", "")),
    ],
)
def test_wrong_value_is_named(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        check_sampling(SamplingParams(**{name: value}), LIMITS)  # type: ignore[arg-type]
    assert caught.value.param == name
    assert caught.value.http_status == 400


def test_min_tokens_above_max_tokens_is_refused_and_equal_is_taken() -> None:
    with pytest.raises(RequestError, match="min_tokens"):
        check_sampling(SamplingParams(max_tokens=3, min_tokens=4), LIMITS)
    check_sampling(SamplingParams(max_tokens=4, min_tokens=4), LIMITS)


def test_edges_are_taken() -> None:
    edges = SamplingParams(
        temperature=0.0, top_p=1.0, min_p=1.0, top_k=-1, presence_penalty=-2.0, logprobs=5, logit_bias={99: -100.0}
    )
    check_sampling(edges, LIMITS)


REQUEST = AddRequest(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(seed=0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [1, 100]}, "100"),
        ({"prompt_token_ids": [-1]}, "-1"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"sampling": SamplingParams()}, "seed is missing"),
    ],
)
def test_wrong_request_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_request(msgspec.structs.replace(REQUEST, **change), LIMITS)


def test_length_limit_counts_prompt_prior_output_and_answer() -> None:
    check_length(31, 1, LIMITS)
    with pytest.raises(ContextLengthError, match="at most 31"):
        check_length(32, None, LIMITS)
    with pytest.raises(ContextLengthError, match="ask for at most 2"):
        check_length(30, 3, LIMITS)
    with pytest.raises(ContextLengthError):
        check_request(msgspec.structs.replace(REQUEST, prompt_token_ids=[1] * 20, output_token_ids=[1] * 12), LIMITS)
