from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from events import DONE, answer, chat_token, event, token, usage

from pdserve.bench.client.answer import AnswerReader, describe_refusal
from pdserve.bench.measure.samples import Failure, RequestSample


def read(*pieces: bytes, max_tokens: int = 3, is_full_length: bool = True) -> RequestSample:
    """Read an answer whose pieces arrive a second apart."""
    sample = RequestSample(0, 0.0, 0.0, 0.0)
    reader = AnswerReader(sample, max_tokens, is_full_length=is_full_length)
    for second, piece in enumerate(pieces, 1):
        sample.failure = reader.take(piece, float(second))
        if sample.failure is not None:
            return sample
    sample.failure = reader.finish()
    return sample


def test_a_whole_answer() -> None:
    sample = read(*answer(3))
    assert sample.failure is None
    assert sample.event_times_s == [1.0, 2.0, 3.0]
    assert (sample.num_prompt_tokens, sample.num_output_tokens, sample.has_usage) == (7, 3, True)
    assert sample.end_s == 4.0


def test_only_events_with_text_count() -> None:
    pieces = (
        chat_token(role="assistant", content=""),
        chat_token(content="a"),
        b": ping\n\n",
        chat_token(reasoning_content="b"),
        chat_token(content=None),
        chat_token(content="c"),
        chat_token(finish_reason="length"),
        usage(7, 3),
        DONE,
    )
    sample = read(*pieces)
    assert sample.failure is None
    assert sample.event_times_s == [2.0, 4.0, 6.0]


def test_usage_counts_tokens_that_show_no_text_of_their_own() -> None:
    sample = read(token("a"), token("b", "length"), usage(7, 5), DONE, max_tokens=5)
    assert sample.failure is None
    assert (len(sample.event_times_s), sample.num_output_tokens) == (2, 5)


def test_usage_may_come_with_the_last_token() -> None:
    last = event(
        choices=[{"index": 0, "text": "b", "finish_reason": "length"}],
        usage={"prompt_tokens": 1, "completion_tokens": 2},
    )
    assert read(token("a"), last, DONE, max_tokens=2).failure is None


def test_without_usage_events_stand_for_tokens() -> None:
    sample = read(token(), token(), token(finish_reason="length"), DONE)
    assert sample.failure is None
    assert (sample.num_output_tokens, sample.has_usage, sample.num_prompt_tokens) == (3, False, None)


def test_an_answer_without_any_text_ends_at_a_moment() -> None:
    sample = read(token("", "length"), usage(7, 1), DONE, max_tokens=1)
    assert sample.failure is None
    assert sample.event_times_s == [1.0]


def test_several_events_in_one_piece_arrive_together() -> None:
    assert read(b"".join(answer(3))).event_times_s == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("pieces", "kind", "message"),
    [
        ((token(), token()), "cut_short", "without a finish reason"),
        ((), "cut_short", "without a finish reason"),
        ((token(finish_reason="length"), usage(7, 3)), "cut_short", r"without \[DONE\]"),
        ((*answer(3)[:-1], b"data: [DO"), "cut_short", "without a finish reason"),
        ((token(finish_reason="stop"), usage(7, 1), DONE), "cut_short", "1 of 3 tokens came, finish reason stop"),
        ((*[token()] * 2, token(finish_reason="length"), usage(7, 2), DONE), "count_mismatch", "3 events .* 2 tokens"),
        ((token(finish_reason="length"), usage(7, 9), DONE), "count_mismatch", "9 tokens where 3"),
        ((token(), b"data: {nonsense\n\n"), "malformed_event", "an event is not what the API says"),
        ((token(), b"data: [1]\n\n"), "malformed_event", "an event is not what the API says"),
        ((token(), b"data: \xff\n\n"), "malformed_event", "an event is not what the API says"),
        ((token(), event(error={"message": "out of memory"})), "stream_error", "^out of memory$"),
        ((event(error="plain"),), "stream_error", "^plain$"),
        ((event(error={"message": "x" * 1000}),), "stream_error", "^x{199}…$"),
    ],
)
def test_an_answer_that_is_not_whole_is_lost(pieces: tuple[bytes, ...], kind: str, message: str) -> None:
    failure = read(*pieces).failure
    assert failure is not None
    assert failure.kind == kind
    assert pytest.raises(AssertionError, match=message).matches(AssertionError(failure.message))


def test_an_answer_may_stop_early_where_eos_counts() -> None:
    pieces = (token(), token(finish_reason="stop"), usage(7, 2), DONE)
    assert read(*pieces, is_full_length=False).failure is None
    ended = (token(), token(finish_reason="length"), usage(7, 2), DONE)
    failure = read(*ended, is_full_length=False).failure
    assert failure is not None
    assert failure.kind == "cut_short"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long", "code": "x"}}', "too long"),
        (b'{"error": "busy"}', "busy"),
        (b'{"message": "none such"}', "none such"),
        (b'{"detail": 1}', "{'detail': 1}"),
        (b"Bad Gateway", "Bad Gateway"),
        (b"", "no body"),
        (b"\xff", "\ufffd"),
    ],
)
def test_a_refusal_has_its_status_and_the_servers_words(body: bytes, message: str) -> None:
    assert describe_refusal(429, body) == Failure("http_429", message)
