from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.router.watched_files import WatchedFiles


class Loaded:
    """Holds what a file held when it was right."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: list[str] = []
        self.num_tries = 0

    def load(self) -> None:
        self.num_tries += 1
        try:
            text = self.path.read_text()
        except OSError as error:
            raise ConfigError(f"{error.strerror}") from None
        if text == "wrong":
            raise ConfigError("it is wrong")
        self.values.append(text)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def replace(path: Path, text: str) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)


def test_changes_are_loaded_and_mistakes_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    loaded = Loaded(path)
    watched = WatchedFiles([path], loaded.load, "the words were")

    async def main() -> None:
        following = asyncio.create_task(watched.follow(0.001))
        replace(path, "two")
        await wait_until(lambda: loaded.values == ["one", "two"])
        replace(path, "wrong")
        await wait_until(lambda: loaded.num_tries == 3)
        path.unlink()
        await wait_until(lambda: loaded.num_tries == 4)
        replace(path, "three")
        await wait_until(lambda: loaded.num_tries == 5)
        following.cancel()

    asyncio.run(main())
    assert loaded.values == ["one", "two", "three"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "the words were not read again, those from before stay valid: it is wrong",
        "the words were not read again, those from before stay valid: No such file or directory",
    ]


def test_what_changed_between_loading_and_following_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    loaded = Loaded(path)
    watched = WatchedFiles([path], loaded.load, "the words were")
    replace(path, "two")

    async def main() -> None:
        following = asyncio.create_task(watched.follow(0.001))
        await wait_until(lambda: loaded.values == ["one", "two"])
        following.cancel()

    asyncio.run(main())


def test_wrong_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        WatchedFiles([tmp_path / "none"], Loaded(tmp_path / "none").load, "the words were")
