from __future__ import annotations

import sys

import pytest

from pdserve.commands.screen import Screen


def test_a_line_does_not_go_on_where_a_text_stands(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.write("The sky")
    screen.write("")
    screen.say("a log line", file=sys.stderr)
    screen.say("another")
    screen.write(" is blue.\n")
    screen.say("its way")
    assert capsys.readouterr() == ("The sky\nanother\n is blue.\nits way\n", "a log line\n")


def test_a_reader_that_went_away_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):
        screen.write("The sky")
    screen.say("its way")
