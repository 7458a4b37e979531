from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.client.sse import SSEParser


def parse(*chunks: bytes) -> list[bytes]:
    parser = SSEParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\rx", [b"a", b"b"]),
        (b": ping\n\nevent: message\nid: 3\ndata: a\nretry: 5\n\n", [b"a"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"\n\n\ndata: a\n\n\n\n", [b"a"]),
        (b"data: a\n", []),
        (b"database: a\n\n", []),
    ],
)
def test_events_of_a_stream(text: bytes, events: list[bytes]) -> None:
    assert parse(text) == events


_LINES = st.sampled_from([b"data: x", b"data:", b": comment", b"event: e", b"", b'data: {"a": 1}'])


@given(
    st.lists(_LINES, max_size=12),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_where_a_stream_is_cut_makes_no_difference(lines: list[bytes], end: bytes, cuts: list[int]) -> None:
    text = b"".join(line + end for line in lines) + b"data: last\n\n"
    places = sorted({min(cut, len(text)) for cut in cuts})
    chunks = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert parse(*chunks) == parse(text) == parse(*(bytes([byte]) for byte in text))


def test_an_unfinished_event_is_noticed() -> None:
    parser = SSEParser()
    assert parser.is_between_events
    parser.feed(b"data: a\n")
    assert not parser.is_between_events
    parser.feed(b"\n")
    assert parser.is_between_events
    parser.feed(b"data: b")
    assert not parser.is_between_events
