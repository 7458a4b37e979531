"""What the parts of a hand-off cost in processor time, beside one memcpy: ``python benchmarks/handoff_work.py``.

For each part, the connector's own code moves 250 blocks (4,000 tokens of SmolLM2-135M) again and again, and the least
processor time of the thread that does it counts: other processes on the machine disturb that little. What a server does
meanwhile, on another core, is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import secrets
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from pdserve.bench.show.tables import format_table
from pdserve.bench.transfers.pool import BlockRing
from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.blocks.block_format import HEADER_BYTES, BlockFormat
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.blocks.store import BlockStore, SealedBlock
from pdserve.connectors.nixl.agent import TransferAgent
from pdserve.connectors.nixl.pool_memory import PoolMemory
from pdserve.connectors.redis.options import parse_options
from pdserve.connectors.redis.redis_store import RedisStore
from pdserve.connectors.redis.server import RedisServer
from pdserve.connectors.shared_storage.capacity import CapacityKeeper
from pdserve.connectors.shared_storage.directory import BlockDirectory
from pdserve.connectors.shared_storage.file_store import FileStore
from pdserve.connectors.testing.targets.redis_process import RedisProcess
from pdserve.kv_layout import BlockKey, KVCacheSpec, ModelIdentity
from pdserve.protocol import Role

SPEC = KVCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
IDENTITY = ModelIdentity("work", "work", "bfloat16", "exact", SPEC)
NUM_BLOCKS = 250
PIECE_BLOCKS = 10
"""What is moved at once. In service NIXL reads five blocks at once, files come in fours and Redis' by eleven."""
_PROGRESS_S = 0.0005


class Work:
    """Processor time of this thread, by part: the least of all rounds."""

    def __init__(self, num_rounds: int) -> None:
        self.num_rounds = num_rounds
        self.least_s: dict[str, float] = {}
        self._round_s: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens inside belongs to this part of the round."""
        began_s = time.thread_time()
        yield
        self._round_s[name] = self._round_s.get(name, 0.0) + time.thread_time() - began_s

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Every block is moved once inside."""
        self._round_s.clear()
        yield
        for name, seconds in self._round_s.items():
            self.least_s[name] = min(self.least_s.get(name, seconds), seconds)


def pieces(start: int) -> list[range]:
    """The blocks from ``start`` on, in pieces."""
    return [range(first, first + PIECE_BLOCKS) for first in range(start, start + NUM_BLOCKS, PIECE_BLOCKS)]


def measure_memory(work: Work, ring: BlockRing, source: BlockRing) -> None:
    """Copies and checksums within this process."""
    memory, blocks = PoolMemory(ring.kv_cache, SPEC), BlockMemory(ring.kv_cache, SPEC, "work")
    staging = np.zeros((NUM_BLOCKS, HEADER_BYTES + SPEC.block_bytes), dtype=np.uint8)
    staging.fill(0)
    for _ in range(work.num_rounds):
        with work.round():
            half = ring.take(NUM_BLOCKS)
            block_ids = range(half.start, half.stop)
            with work.part("memcpy"):
                np.copyto(ring.rows[half], source.rows[half])
            with work.part("checksum, not in the cache"):
                memory.get_checksums(block_ids)
            with work.part("copy to staging memory"):
                for block_id, row in zip(block_ids, staging, strict=True):
                    blocks.copy_out(block_id, SPEC.block_size, row.data[HEADER_BYTES:])


def measure_store(work: Work, name: str, store: BlockStore, ring: BlockRing) -> None:
    """Seal, write and read back through a store; reading verifies."""
    block_format, memory = BlockFormat(IDENTITY, SPEC), BlockMemory(ring.kv_cache, SPEC, "work")
    values = np.ones((NUM_BLOCKS, block_format.value_bytes), dtype=np.uint8)
    for _ in range(work.num_rounds):
        keys = [BlockKey(secrets.token_bytes(16), SPEC.block_size) for _ in range(NUM_BLOCKS)]
        start = ring.take(NUM_BLOCKS).start
        with work.round():
            for piece in pieces(0):
                sealed = [SealedBlock(keys[i], values[i].data) for i in piece]
                with work.part(f"{name}: checksum and header"):
                    for block in sealed:
                        block_format.seal(block.key, block.value)
                with work.part(f"{name}: write"):
                    store.write(sealed)
            for piece in pieces(0):
                wanted = [BlockTransfer(keys[i].digest, keys[i].num_tokens, start + i) for i in piece]
                with work.part(f"{name}: read and verify"):
                    failures = [failure for failure in store.read(wanted, memory) if failure is not None]
                assert not failures, failures


def serve_pool(pipe: Connection) -> None:
    """The process whose blocks NIXL reads."""
    ring = BlockRing(SPEC, 2 * NUM_BLOCKS)
    ring.fill()
    memory = PoolMemory(ring.kv_cache, SPEC)
    agent = TransferAgent(f"work-producer-{secrets.token_hex(4)}", memory.region, "lo")
    pipe.send((agent.get_metadata(), memory.region))
    while not pipe.poll(_PROGRESS_S):
        agent.progress()


def measure_nixl(work: Work, ring: BlockRing) -> None:
    """Read another process's blocks, and the checksums of what has just arrived."""
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=serve_pool, args=(theirs,), daemon=True)
    process.start()
    metadata, region = pipe.recv()
    memory = PoolMemory(ring.kv_cache, SPEC)
    agent = TransferAgent(f"work-consumer-{secrets.token_hex(4)}", memory.region, "lo")
    remote = agent.connect(metadata, region)
    for _ in range(work.num_rounds):
        with work.round():
            for piece in pieces(ring.take(NUM_BLOCKS).start):
                with work.part("nixl: read"):
                    read = agent.start_read(piece, remote, piece)
                    while read is not None and not agent.poll(read):
                        pass
                with work.part("nixl: checksum of what has just been read"):
                    memory.get_checksums(piece)
    agent.disconnect(remote)
    agent.close()
    pipe.send(None)
    process.join()


@contextlib.contextmanager
def file_store(max_bytes: int | None) -> Iterator[BlockStore]:
    """Files in shared memory, where there is some; with a limit, blocks are soon written over old files."""
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as root:
        block_format = BlockFormat(IDENTITY, SPEC)
        directory = BlockDirectory(Path(root), block_format.value_bytes)
        yield FileStore(directory, block_format, CapacityKeeper(directory, max_bytes=max_bytes, min_age_s=0.0))


@contextlib.contextmanager
def redis_store() -> Iterator[BlockStore]:
    """A server on a unix socket."""
    process = RedisProcess()
    process.start()
    try:
        context = ConnectorContext("work", Role.PREFILL, IDENTITY, SPEC, {"url": process.url})
        options = parse_options(context)
        yield RedisStore(RedisServer(options, timeout_s=60.0), context, options)
    finally:
        process.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="how often each part is tried")
    work = Work(parser.parse_args().rounds)
    ring, source = BlockRing(SPEC, 2 * NUM_BLOCKS), BlockRing(SPEC, 2 * NUM_BLOCKS)
    source.fill()
    measure_memory(work, ring, source)
    measure_nixl(work, ring)
    stores = {
        "shared_storage, new files": file_store(None),
        "shared_storage, full": file_store(2 * NUM_BLOCKS * SPEC.block_bytes),
        "redis, client": redis_store(),
    }
    for name, opened in stores.items():
        with opened as store:
            measure_store(work, name, store, ring)
    memcpy_s = work.least_s["memcpy"]
    rows = [["processor time", "ms", "memcpy = 1"]]
    rows += [[name, f"{part_s * 1e3:.1f}", f"{part_s / memcpy_s:.2f}"] for name, part_s in work.least_s.items()]
    print(f"{NUM_BLOCKS * SPEC.block_bytes / 1e6:.1f} MB in {NUM_BLOCKS} blocks\n\n{format_table(rows)}")


if __name__ == "__main__":
    main()
