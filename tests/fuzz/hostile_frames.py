"""Frames that no honest peer sends: noise, and valid messages cut, flipped, lengthened or given wild values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

INVALID_UTF8 = msgspec.Raw(b"\xa3\xff\xfe\xfd")
DEEP = msgspec.Raw(b"\x91" * 5000 + b"\xc0")
WILD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -(2**63)),
    *(float("nan"), float("inf"), float("-inf"), 1e308, -0.0, 5e-324),
    *("", "x", "a\nb", "\x00", "../../etc/passwd", "é" * 300, "x" * 5000, b"", b"\xff" * 33),
    *([], {}, [None], [[]], {"a": None}, {"type": "add"}, list(range(300)), INVALID_UTF8, DEEP),
]


@st.composite
def mutated_messages(draw: st.DrawFn, messages: Sequence[Any]) -> bytes:
    """A valid message in which some values are replaced, left out or added."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(draw(st.sampled_from(messages))))
    for _ in range(draw(st.integers(1, 2))):
        plain = _mutate(draw, plain)
    return msgspec.msgpack.encode(plain)


def _mutate(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, dict) and value:
        key = draw(st.sampled_from(sorted(value, key=repr)))
        match draw(st.sampled_from(("inside", "inside", "inside", "drop", "add"))):
            case "drop":
                return {k: v for k, v in value.items() if k != key}
            case "add":
                return {**value, "unknown": draw(st.sampled_from(WILD))}
            case _:
                return {**value, key: _mutate(draw, value[key])}
    if isinstance(value, list) and value and draw(st.booleans()):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], _mutate(draw, value[index]), *value[index + 1 :]]
    alike = [wild for wild in WILD if type(wild) is type(value)]
    return draw(st.sampled_from(alike if alike and draw(st.integers(0, 3)) else WILD))


@st.composite
def damaged_frames(draw: st.DrawFn, messages: Sequence[Any]) -> bytes:
    """A valid message's bytes, cut, flipped or lengthened."""
    frame = msgspec.msgpack.encode(draw(st.sampled_from(messages)))
    position = draw(st.integers(0, len(frame) - 1))
    match draw(st.sampled_from(("cut", "flip", "insert"))):
        case "cut":
            return frame[:position]
        case "flip":
            flipped = bytes([frame[position] ^ draw(st.integers(1, 255))])
            return frame[:position] + flipped + frame[position + 1 :]
        case _:
            return frame[:position] + draw(st.binary(min_size=1, max_size=20)) + frame[position:]


def hostile_frames(messages: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """One frame: noise, damaged, mutated, or one of the ``messages`` at a time when nobody expects it."""
    return st.one_of(
        mutated_messages(messages),
        mutated_messages(messages),
        damaged_frames(messages),
        st.binary(max_size=100),
        st.sampled_from(messages).map(msgspec.msgpack.encode),
    )
