"""What a soak's KV goes through, and the harm that is done to it while requests run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis
from linked_nixl import LINK_OPTION
from processes import Deployment

from pdserve.connectors.testing.faults.link import Damage, FaultyLink
from pdserve.connectors.testing.free_port import find_free_port
from pdserve.connectors.testing.targets.redis_process import RedisProcess

_HARM_S = 1.5
_NUM_DAMAGED = 100
_BAD_LINKS = [damage for damage in Damage if damage is not Damage.NONE]


@dataclass(frozen=True)
class Harm:
    """Something that goes wrong and is over when ``inflict`` returns."""

    name: str
    inflict: Callable[[], None]


def for_a_moment(name: str, build: Callable[[], AbstractContextManager[None]]) -> Harm:
    """A harm that lasts as long as the context that ``build`` gives."""

    def inflict() -> None:
        with build():
            time.sleep(_HARM_S)

    return Harm(name, inflict)


def flip_byte(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


def cut_short(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


class Medium:
    """Nothing that could be harmed.

    Attributes:
        connector: the setting.
        options: the connector's options, in every instance.
        harms: what can be done to it.
    """

    def __init__(self, connector: str, options: dict[str, Any] | None = None) -> None:
        self.connector = connector
        self.options: dict[str, Any] = options or {}
        self.harms: list[Harm] = []

    def get_own_options(self, role: str, index: int) -> dict[str, Any]:
        """What one instance gets besides."""
        return {}

    def equip(self, deployment: Deployment) -> None:
        """Put the options on the instances' command lines."""
        for role in ("prefill", "decode"):
            for index, instance in enumerate(getattr(deployment, role)):
                for name, value in {**self.options, **self.get_own_options(role, index)}.items():
                    text = value if isinstance(value, str) else json.dumps(value)
                    instance.command += ["--connector-option", f"{name}={text}"]

    def close(self) -> None:
        """Put everything away."""


class Files(Medium):
    """A directory: files that rot, are cut and vanish; as root, on a file system of its own that fills up."""

    def __init__(self, connector: str, directory: Path) -> None:
        super().__init__(connector)
        self._disk = directory / "disk"
        self._disk.mkdir()
        self._root = self._disk / "kv"
        self._is_mounted = os.getuid() == 0 and self._mount("size=1g")
        self._rng = random.Random(3)
        if connector == "lmcache":
            # No cache of its own, so that the files are read; little memory, for it is taken at start.
            self.options = {"url": f"fs://{self._root}", "cpu_cache": False, "max_cpu_bytes": 16 << 20}
        else:
            self.options = {"path": str(self._root)}
        self.harms = [
            Harm("flipping bits in files", lambda: self._damage(flip_byte)),
            Harm("cutting files short", lambda: self._damage(cut_short)),
            Harm("deleting files", lambda: self._damage(None)),
            for_a_moment("taking the directory away", self._gone),
        ]
        if self._is_mounted:
            self.harms.append(for_a_moment("filling the disk", self._full))

    def close(self) -> None:
        if self._is_mounted:
            subprocess.run(["umount", "--lazy", str(self._disk)], check=False)

    def _mount(self, options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._disk)]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def _damage(self, change: Callable[[bytes], bytes] | None) -> None:
        files = [path for path in self._root.rglob("*") if path.is_file()]
        for path in self._rng.sample(files, min(_NUM_DAMAGED, len(files))):
            with contextlib.suppress(FileNotFoundError, IndexError):
                if change is None:
                    path.unlink()
                else:
                    path.write_bytes(change(path.read_bytes()))

    @contextlib.contextmanager
    def _gone(self) -> Iterator[None]:
        away = self._root.with_name("away")
        self._root.rename(away)
        yield
        meanwhile = self._root.with_name(f"meanwhile-{time.monotonic_ns()}")
        with contextlib.suppress(FileNotFoundError):  # an instance that was started again has made a new one
            self._root.rename(meanwhile)
        away.rename(self._root)
        shutil.rmtree(meanwhile, ignore_errors=True)

    @contextlib.contextmanager
    def _full(self) -> Iterator[None]:
        usage = os.statvfs(self._disk)
        used_bytes = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        self._mount(f"remount,size={used_bytes + (1 << 16)}")
        yield
        self._mount("remount,size=1g")


class Redis(Medium):
    """A server of its own that is restarted, emptied, deaf and full, behind a link that can be damaged."""

    def __init__(self) -> None:
        super().__init__("redis")
        self._server = RedisProcess()
        self._server.start()
        self._client = redis.Redis(unix_socket_path=str(self._server.unix_path))
        self._link = FaultyLink(str(self._server.unix_path), str(self._server.directory / "link"))
        self._rng = random.Random(3)
        self.options = {"url": f"unix://{self._link.address}"}
        self.harms = [
            Harm("restarting the server", self._restart),
            Harm("flushing the server", self._client.flushall),
            Harm("flipping bits in values", lambda: self._damage(flip_byte)),
            Harm("cutting values short", lambda: self._damage(cut_short)),
            for_a_moment("stopping the server", self._server.stopped),
            for_a_moment("filling the server", self._full),
            *damage_links([self._link]),
        ]

    def close(self) -> None:
        self._client.close()
        self._link.close()
        self._server.close()

    def _restart(self) -> None:
        self._server.kill()
        time.sleep(_HARM_S)
        self._server.start()

    def _damage(self, change: Callable[[bytes], bytes]) -> None:
        names = list(self._client.scan_iter(count=1000))
        for name in self._rng.sample(names, min(_NUM_DAMAGED, len(names))):
            value = self._client.get(name)
            if value:
                self._client.set(name, change(value))

    @contextlib.contextmanager
    def _full(self) -> Iterator[None]:
        self._client.config_set("maxmemory", 1)
        yield
        self._client.config_set("maxmemory", 0)


class Nixl(Medium):
    """Side channels behind links that can be damaged; the blocks themselves go from memory to memory."""

    def __init__(self, num_prefill: int) -> None:
        super().__init__("linked_nixl:LinkedNixl")
        self._ports = [find_free_port() for _ in range(num_prefill)]
        self._links = [FaultyLink(("127.0.0.1", port), ("127.0.0.1", 0)) for port in self._ports]
        self.harms = damage_links(self._links)

    def get_own_options(self, role: str, index: int) -> dict[str, Any]:
        if role == "decode":
            return {}
        return {"port": str(self._ports[index]), LINK_OPTION: str(self._links[index].address[1])}

    def close(self) -> None:
        for link in self._links:
            link.close()


class Multi(Medium):
    """NIXL for the hand-off and a store behind it, with the harms of both."""

    def __init__(self, *children: Medium) -> None:
        super().__init__("multi")
        self._children = children
        self.harms = [harm for child in children for harm in child.harms]

    def get_own_options(self, role: str, index: int) -> dict[str, Any]:
        children = [
            {"connector": child.connector, "options": {**child.options, **child.get_own_options(role, index)}}
            for child in self._children
        ]
        return {"children": children}

    def close(self) -> None:
        for child in self._children:
            child.close()


def damage_links(links: Iterable[FaultyLink]) -> list[Harm]:
    """Every damage to all links at once."""

    @contextlib.contextmanager
    def inflict(damage: Damage) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for link in links:
                stack.enter_context(link.inflict(damage))
            yield

    return [for_a_moment(f"a link that {damage.value}", partial(inflict, damage)) for damage in _BAD_LINKS]


def freeze_one(deployment: Deployment) -> Harm:
    """An instance stands still for a moment, as on a machine that is overloaded."""
    rng = random.Random(7)

    @contextlib.contextmanager
    def freeze() -> Iterator[None]:
        process = rng.choice(deployment.instances).process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        yield
        process.send_signal(signal.SIGCONT)  # one that was killed meanwhile does not mind

    return for_a_moment("an instance stands still", freeze)


def build_medium(connector: str, directory: Path, num_prefill: int) -> Medium:
    """What the named connector's KV goes through."""
    here = str(Path(__file__).resolve().parent)  # where instances find linked_nixl
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    match connector:
        case "shared_storage" | "lmcache":
            return Files(connector, directory)
        case "redis":
            return Redis()
        case "nixl":
            return Nixl(num_prefill)
        case "multi":
            return Multi(Nixl(num_prefill), Files("shared_storage", directory))
        case _:
            return Medium(connector)
