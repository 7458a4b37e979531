"""Identity of blocks: complete, chained, the same in every process."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from pdserve.kv_layout import BlockHasher, KVCacheSpec, ModelIdentity, Rank

SPEC = KVCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
IDENTITY = ModelIdentity(weights="w", architecture="a", compute_dtype="bfloat16", numerics="n", kv=SPEC)


def test_sizes_of_smollm2() -> None:
    assert SPEC.token_bytes == 23_040
    assert SPEC.block_bytes == 368_640
    assert [SPEC.num_blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "x"},
        {"architecture": "x"},
        {"compute_dtype": "float32"},
        {"numerics": "x"},
        {"kv": msgspec.structs.replace(SPEC, dtype="float32")},
        {"kv": msgspec.structs.replace(SPEC, block_size=32)},
        {"kv": msgspec.structs.replace(SPEC, num_kv_heads=1)},
        {"kv": msgspec.structs.replace(SPEC, layout_version=2)},
        {"tensor_parallel_size": 3},
        {"pipeline_parallel_size": 2},
    ],
)
def test_every_part_of_the_identity_changes_the_fingerprint_and_is_named(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(IDENTITY, **change)
    assert other.fingerprint != IDENTITY.fingerprint
    assert next(iter(change)) in IDENTITY.explain_difference(other)
    assert IDENTITY.explain_difference(IDENTITY) == ""


def test_ranks_are_numbered_and_named_over_both_ways_of_sharing() -> None:
    ranks = [Rank(tensor, 3, pipeline, 2) for pipeline in range(2) for tensor in range(3)]
    assert [rank.index for rank in ranks] == list(range(6))
    assert ranks[4].all_ranks == ranks
    assert {rank.size for rank in ranks} == {6}
    assert [rank.label for rank in ranks[2:4]] == ["tp2of3-pp0of2", "tp0of3-pp1of2"]


def test_the_only_rank_has_no_label() -> None:
    assert (Rank().index, Rank().size, Rank().label) == (0, 1, "")


def test_keys_depend_on_everything_before_them() -> None:
    hasher = BlockHasher("f")
    a = hasher.block_keys(list(range(40)), 16)
    b = hasher.block_keys([99, *range(1, 40)], 16)
    assert [k.num_tokens for k in a] == [16, 16, 8]
    assert all(x.digest != y.digest for x, y in zip(a, b, strict=True))


def test_partial_block_never_equals_a_full_or_longer_one() -> None:
    hasher = BlockHasher("f")
    digests = {hasher.block_keys([0] * n, 16)[0].digest for n in range(1, 17)}
    assert len(digests) == 16


@pytest.mark.parametrize("other", [BlockHasher("g"), BlockHasher("f", cache_salt="s"), BlockHasher("f", adapter="s@1")])
def test_fingerprint_salt_and_adapter_start_different_chains(other: BlockHasher) -> None:
    assert other.block_keys([1, 2], 16) != BlockHasher("f").block_keys([1, 2], 16)


def test_salt_and_adapter_are_not_mixed_up() -> None:
    assert BlockHasher("f", cache_salt="x").root != BlockHasher("f", adapter="x").root


def test_keys_are_the_same_in_another_process() -> None:
    code = "from pdserve.kv_layout import BlockHasher; print(BlockHasher('f').block_keys([1, 2, 3], 2)[-1].hex)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == BlockHasher("f").block_keys([1, 2, 3], 2)[-1].hex
