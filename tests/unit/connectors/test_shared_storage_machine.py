"""Any order of saves, evictions, damage, lookups, loads and aborts, with a dictionary as the model."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.connectors.shared_storage import SharedStorageConnector
from pdserve.connectors.testing import EngineHarness, build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.kv_layout import BlockHasher, BlockKey
from pdserve.protocol import Role

S = TINY_SPEC.block_size
# Two families of prompts that share prefixes of every length up to four blocks and a bit.
PROMPTS = st.builds(lambda family, length: [family] * 5 + list(range(length)), st.integers(0, 1), st.integers(0, 13))


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="pdserve-test-"))
        self.prefill = self._engine(Role.PREFILL)
        self.decode = self._engine(Role.DECODE)
        self.names = (f"r{number}" for number in itertools.count())
        self.is_good: dict[BlockKey, bool] = {}

    def _engine(self, role: Role) -> EngineHarness:
        context = build_context(role, {"path": str(self.root)}, engine_id=role.value)
        return EngineHarness(SharedStorageConnector, context)

    def _keys(self, prompt: Sequence[int]) -> list[BlockKey]:
        return BlockHasher(self.prefill.context.identity.fingerprint).block_keys(prompt, S)

    def _count_run(self, keys: Sequence[BlockKey], *, only_good: bool) -> int:
        run = itertools.takewhile(
            lambda key: self.is_good.get(key, False) or (key in self.is_good and not only_good), keys
        )
        return sum(key.num_tokens for key in run)

    @rule(prompt=PROMPTS, chunk=st.integers(1, 20))
    def save(self, prompt: list[int], chunk: int) -> None:
        assert self.prefill.send(next(self.names), prompt, chunk=chunk)
        for key in self._keys(prompt):
            self.is_good.setdefault(key, True)  # what is there is not written again, damaged or not

    @rule(prompt=PROMPTS, index=st.integers(0, 4))
    def evict(self, prompt: list[int], index: int) -> None:
        for key in self._keys(prompt)[index : index + 1]:
            if self.is_good.pop(key, None) is not None:
                self._path(key).unlink()

    @rule(prompt=PROMPTS, index=st.integers(0, 4), offset=st.integers(0, TINY_SPEC.block_bytes + 79))
    def damage(self, prompt: list[int], index: int, offset: int) -> None:
        for key in self._keys(prompt)[index : index + 1]:
            if self.is_good.get(key):
                data = bytearray(self._path(key).read_bytes())
                data[offset] ^= 0x10
                self._path(key).write_bytes(data)
                self.is_good[key] = False

    @rule(prompt=PROMPTS, num_local_blocks=st.integers(0, 4))
    def load(self, prompt: list[int], num_local_blocks: int) -> None:
        self._start_load(prompt, num_local_blocks, abort=False)

    @rule(prompt=PROMPTS, num_local_blocks=st.integers(0, 4))
    def abort_a_load(self, prompt: list[int], num_local_blocks: int) -> None:
        self._start_load(prompt, num_local_blocks, abort=True)

    def _start_load(self, prompt: list[int], num_local_blocks: int, *, abort: bool) -> None:
        name = next(self.names)
        num_local = min(num_local_blocks, len(prompt) // S) * S
        keys = self._keys(prompt)[num_local // S :]
        self.decode.submit(name, prompt)
        match = self.decode.lookup(name, num_local)
        assert match.num_tokens == self._count_run(keys, only_good=False)
        self.decode.admit(name, match.num_tokens, num_local)
        if abort:
            self.decode.finish(name)
        self.decode.step_until(lambda: self.decode.is_idle)
        if match.num_tokens:
            assert self.decode.received[name] == self._count_run(keys, only_good=True)
        if not abort:
            self.decode.finish(name)
        self._forget_removed(keys)

    def _forget_removed(self, keys: Sequence[BlockKey]) -> None:
        """A load removes the first damaged block that it meets, and looks no further."""
        for key in itertools.takewhile(self.is_good.__contains__, keys):
            if not self.is_good[key]:
                del self.is_good[key]
                return

    @invariant()
    def nothing_is_owed_and_nothing_used(self) -> None:
        for engine in (self.prefill, self.decode):
            assert engine.is_idle
            assert engine.num_used_blocks == 0

    @invariant()
    def the_directory_holds_what_the_model_holds(self) -> None:
        assert {path.stem for path in self.root.glob("?/?/*")} == {key.hex for key in self.is_good}
        assert not list(self.root.glob("tmp/*"))

    def _path(self, key: BlockKey) -> Path:
        return self.root / key.hex[0] / key.hex[1] / f"{key.hex}.kv"

    def teardown(self) -> None:
        self.prefill.close()
        self.decode.close()
        shutil.rmtree(self.root)


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestStoreMachine = StoreMachine.TestCase
