"""A disk without room under a directory: a small file system over it, or, where nobody may mount, a limit on files."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

_SIZE = "size=64m,nr_inodes=100k"
_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 20


def full_disk(directory: Path) -> AbstractContextManager[None]:
    """Inside, ``directory`` takes no byte more; afterwards it is as it was.

    A small file system lies over it, full, with the directories that were there and none of the files. Who may not
    mount gets a limit instead: no file of this process grows, a write fails with EFBIG, and what is stored stays in
    sight.
    """
    names = [path.name for path in directory.iterdir() if path.is_dir()]
    if _run("mount", "-t", "tmpfs", "-o", _SIZE, "tmpfs", str(directory)):
        return _full_mount(directory, names)
    return no_file_grows()


def release_mounts(directory: Path) -> None:
    """Take away what a process that was ended inside of `full_disk` left mounted below ``directory``."""
    with contextlib.suppress(FileNotFoundError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            if Path(line.split(" ")[1]).is_relative_to(directory):
                _run("umount", "--lazy", line.split(" ")[1])


@contextlib.contextmanager
def no_file_grows() -> Iterator[None]:
    """Inside, this process cannot write to files; what it has written stays, and so do sockets and pipes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def _full_mount(directory: Path, names: list[str]) -> Iterator[None]:
    try:
        for name in names:
            (directory / name).mkdir()
        with (directory / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while filler.write(bytes(_CHUNK_BYTES)):
                pass
        yield
    finally:
        _run("umount", "--lazy", str(directory))


def _run(*command: str) -> bool:
    """Whether it went well."""
    with contextlib.suppress(FileNotFoundError):
        return not subprocess.run(command, check=False, capture_output=True, timeout=_TIMEOUT_S).returncode
    return False
