import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import RequestError
from pdserve.text.stop_strings import StopChecker

few = st.text(alphabet="abc", max_size=30)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, strings: list[str]) -> tuple[int, str] | None:
    """Where the first complete match ends, and the longest string that ends there: by trying all places."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            return end, max(found, key=len)
    return None


@given(few, stops, st.booleans(), st.data())
def test_the_outcome_is_the_first_complete_match_however_the_text_is_cut(
    text: str, strings: list[str], include: bool, data: st.DataObject
) -> None:
    checker = StopChecker(strings, include)
    shown, stopped, rest = "", None, text
    while rest and stopped is None:
        count = data.draw(st.integers(1, len(rest)))
        emitted, stopped = checker.push(rest[:count])
        shown += emitted
        rest = rest[count:]
    expected = first_match(text, strings)
    if expected is None:
        assert (stopped, shown + checker.flush()) == (None, text)
    else:
        end, string = expected
        assert (shown, stopped) == (text[: end if include else end - len(string)], string)
        assert checker.flush() == ""


@given(few, stops)
def test_no_more_waits_than_could_begin_a_stop_string(text: str, strings: list[str]) -> None:
    checker = StopChecker(strings)
    shown = ""
    for index, character in enumerate(text, 1):
        emitted, stopped = checker.push(character)
        shown += emitted
        if stopped is not None:
            return
        waiting = text[len(shown) : index]
        beginnings = [s[:n] for s in strings for n in range(1, len(s))]
        assert waiting == max((b for b in beginnings if text[:index].endswith(b)), key=len, default="")


def test_text_that_was_held_comes_when_it_turns_out_harmless() -> None:
    checker = StopChecker(["###"])
    assert [checker.push(piece) for piece in ("a#", "#", "b", "##")] == [
        ("a", None),
        ("", None),
        ("##b", None),
        ("", None),
    ]
    assert checker.flush() == "##"
    assert checker.flush() == ""


def test_one_piece_may_hold_everything() -> None:
    assert StopChecker(["END"]).push("one END two END") == ("one ", "END")
    assert StopChecker(["END"], include=True).push("one END two END") == ("one END", "END")


@pytest.mark.parametrize("strings", [[""], ["a", ""]])
def test_an_empty_stop_string_is_the_clients_mistake(strings: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        StopChecker(strings)
    assert caught.value.param == "stop"
