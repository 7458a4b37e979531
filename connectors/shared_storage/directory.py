"""The directory that holds the blocks: names, presence, atomic publication, removal, the inventory.

::

    root/3/f/3fa0….kv         one file a block, named by its key; 3fa0….tp0of2-pp0of1.kv: one rank's share of it
    root/tmp/3fa0….<unique>   a block being written, in a new or an evicted file; renamed into place when it is whole

Two levels of sixteen: directories stay small up to a few million blocks, and an inventory opens 256 of them.

Engines on several machines may share the directory. Nothing here needs locks, memory maps or a clock in common:
a rename is atomic, two writers of one key publish equal bytes, and a file that disappears is a miss. Whoever moves a
file to ``tmp`` owns it; a reader that had it open may see it change, which its checksum tells. The root is made
once, at start; when somebody removes it later it is not made again, for `pdserve up` removes its own at exit.

Blocks are regular files. What else somebody puts in the place of one (a link, a pipe, a device) is never followed,
waited for or written to; the next save of that block replaces it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.kv_layout import BlockKey, Rank

_SUFFIX = ".kv"
_HEX_DIGITS = "0123456789abcdef"
_STALE_TEMP_S = 600.0
_TOUCH_AFTER_S = 10.0
# A pipe would keep whoever opens it waiting for its other end; for regular files it makes no difference.
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ONLY_RANK = Rank()


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One published file in the inventory.

    Attributes:
        path: where.
        block: its key in hexadecimal digits, the same for the shares of all ranks.
        size_bytes: its length.
        mtime: when it was used last.
    """

    path: str
    block: str
    size_bytes: int
    mtime: float


@dataclass(frozen=True, slots=True)
class UnpublishedFile:
    """A block being written: whose it is, its temporary path, and where it is open for writing."""

    key: BlockKey
    path: str
    fd: int


class BlockDirectory:
    """One process's view of the directory; any thread may use it.

    Args:
        root: the directory.
        file_bytes: size of a whole file; one of another size counts as absent.
        wall_clock: seconds since the epoch, for ages.
        rank: whose share of each block its files hold.

    Attributes:
        file_bytes: as given.
    """

    def __init__(
        self,
        root: Path,
        file_bytes: int,
        wall_clock: Callable[[], float] = time.time,
        *,
        rank: Rank = _ONLY_RANK,
    ) -> None:
        self._root = str(root)
        self.file_bytes = file_bytes
        self._suffix = _name_suffix(rank)
        self._wall_clock = wall_clock
        self._token = secrets.token_hex(6)
        self._serial = itertools.count()

    @property
    def root(self) -> str:
        """The directory's path."""
        return self._root

    def create_root(self, *, must_be_ours: bool) -> None:
        """Make the directory if it is not there.

        Args:
            must_be_ours: refuse one of another owner (a well-known name in a directory that all users write to).

        Raises:
            ConfigError: it cannot be made, is no directory, or is somebody else's.
        """
        try:
            os.makedirs(self._root, mode=0o700, exist_ok=True)
            owner = os.stat(self._root, follow_symlinks=not must_be_ours).st_uid
        except OSError as error:
            raise ConfigError(f"connector shared_storage: cannot use path {self._root}: {error.strerror}") from error
        if must_be_ours and owner != os.getuid():
            raise ConfigError(
                f"connector shared_storage: {self._root} belongs to another user (uid {owner}); set option path"
            )

    def has(self, key: BlockKey) -> bool:
        """Whether a whole file for ``key`` is there now; what cannot be read counts as absent."""
        try:
            return os.lstat(self._path_of(key)).st_size == self.file_bytes
        except OSError:
            return False

    def has_shares(self, key: BlockKey, ranks: Sequence[Rank]) -> bool:
        """Whether there are files of these ranks for ``key``, of whatever size: what stages compute may differ."""
        stem = self._path_of(key).removesuffix(self._suffix)
        return all(os.path.isfile(stem + _name_suffix(rank)) for rank in ranks)

    def refresh(self, key: BlockKey) -> bool:
        """`has`, and note the use so that eviction spares the file."""
        path = self._path_of(key)
        try:
            found = os.lstat(path)
        except OSError:
            return False
        if found.st_size != self.file_bytes:
            return False
        self._touch(path, found)
        return True

    def note_use(self, fd: int, found: os.stat_result) -> None:
        """The file was read: eviction spares it."""
        self._touch(fd, found)

    def is_file_of(self, key: BlockKey, found: os.stat_result) -> bool:
        """Whether the file that was ``found`` is ``key``'s now; it is not after it was evicted or replaced."""
        try:
            return os.path.samestat(os.lstat(self._path_of(key)), found)
        except OSError:
            return False

    @contextlib.contextmanager
    def open_for_reading(self, key: BlockKey) -> Iterator[int]:
        """File descriptor of ``key``'s file.

        Raises:
            OSError: FileNotFoundError when it is not there.
        """
        fd = os.open(self._path_of(key), os.O_RDONLY | _OPEN_FLAGS)
        try:
            yield fd
        finally:
            os.close(fd)

    def create_file(self, key: BlockKey) -> UnpublishedFile:
        """An empty temporary file for ``key``; it ends with `publish_file` or `discard_file`.

        Raises:
            OSError: no room, no permission, or the directory is gone.
        """
        path = self._name_temp(key)
        return UnpublishedFile(key, path, self._create(path))

    def reuse_file(self, file: StoredFile, key: BlockKey) -> UnpublishedFile | None:
        """Take a published block's file as the temporary file for ``key``, with what is in it if the size is right.

        Returns:
            None when it is gone, or cannot be written to and was removed.
        """
        path = self._name_temp(key)
        flags = os.O_WRONLY | _OPEN_FLAGS
        if file.size_bytes != self.file_bytes:
            flags |= os.O_TRUNC
        try:
            if self._wall_clock() - file.mtime > _STALE_TEMP_S / 2:
                os.utime(file.path, follow_symlinks=False)  # in tmp it must not look like a dead writer's
            os.rename(file.path, path)
        except FileNotFoundError:
            return None
        try:
            return UnpublishedFile(key, path, os.open(path, flags))
        except OSError:
            _unlink(path)
            return None

    def publish_file(self, file: UnpublishedFile) -> None:
        """Put a whole file in its key's place in one move.

        Raises:
            OSError: it could not be closed or moved, and was discarded.
        """
        try:
            os.close(file.fd)
            self._rename(file.path, self._path_of(file.key))
        except OSError:
            _unlink(file.path)
            raise

    def discard_file(self, file: UnpublishedFile) -> None:
        """Remove a file that will not be published."""
        with contextlib.suppress(OSError):
            os.close(file.fd)
        _unlink(file.path)

    def remove(self, key: BlockKey) -> None:
        """Remove ``key``'s file, if that is possible.

        A good file that another engine publishes in this moment may be hit; that costs a miss.
        """
        _unlink(self._path_of(key))

    def remove_file(self, file: StoredFile) -> None:
        """Remove a listed file; one that is gone is no error.

        Raises:
            OSError: it cannot be removed.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.path)

    def find_mtime(self, path: str) -> float | None:
        """When a listed file was used last; None when it is gone."""
        try:
            return os.lstat(path).st_mtime
        except FileNotFoundError:
            return None

    def list_files(self) -> list[StoredFile]:
        """All published blocks, in no order.

        Raises:
            OSError: the root cannot be read.
        """
        os.stat(self._root)
        files: list[StoredFile] = []
        for first, second in itertools.product(_HEX_DIGITS, repeat=2):
            files.extend(_list_blocks(f"{self._root}/{first}/{second}"))
        return files

    def reap_stale_temps(self) -> int:
        """Remove what writers that died left behind; the number of files removed."""
        oldest = self._wall_clock() - _STALE_TEMP_S
        num_removed = 0
        with contextlib.suppress(OSError), os.scandir(f"{self._root}/tmp") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.path)
                        num_removed += 1
        return num_removed

    def get_space(self) -> tuple[int, int]:
        """Total and free bytes of the file system.

        Raises:
            OSError: the root is gone.
        """
        stats = os.statvfs(self._root)
        return stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize

    def _name_temp(self, key: BlockKey) -> str:
        return f"{self._root}/tmp/{key.hex}.{self._token}-{next(self._serial)}"

    def _path_of(self, key: BlockKey) -> str:
        name = key.hex
        return f"{self._root}/{name[0]}/{name[1]}/{name}{self._suffix}"

    def _touch(self, target: str | int, found: os.stat_result) -> None:
        """Set the file's time to now, unless it is about right: a write of metadata costs more than a look."""
        if self._wall_clock() - found.st_mtime > _TOUCH_AFTER_S:
            with contextlib.suppress(OSError):
                os.utime(target)

    def _create(self, temp: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(temp, flags, 0o600)
        except FileNotFoundError:
            self._make_directory(os.path.dirname(temp))
            return os.open(temp, flags, 0o600)

    def _rename(self, temp: str, path: str) -> None:
        try:
            os.rename(temp, path)
        except FileNotFoundError:
            leaf = os.path.dirname(path)
            self._make_directory(os.path.dirname(leaf))
            self._make_directory(leaf)
            os.rename(temp, path)

    @staticmethod
    def _make_directory(path: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)


def _name_suffix(rank: Rank) -> str:
    return f".{rank.label}{_SUFFIX}" if rank.label else _SUFFIX


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _list_blocks(directory: str) -> list[StoredFile]:
    """Published blocks of one leaf directory; files that are not ours are not listed."""
    files: list[StoredFile] = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        name, _, _ = entry.name.partition(".")
                        files.append(StoredFile(entry.path, name, found.st_size, found.st_mtime))
    return files
