"""Copies of whole blocks by the Triton kernel, under triton's interpreter."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest
import torch

from baton_kernels import blocks as entry

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs them on the device", allow_module_level=True)

from tests.support.interpreted import blocks


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 3, 2, 16, 64), torch.bfloat16),
        ((1, 1, 2, 1, 3), torch.float16),
        ((3,), torch.uint8),
        ((1, 1, 2, 16, 17), torch.float32),
        ((8, 5, 2, 64, 64), torch.bfloat16),
        ((1, 0), torch.float32),
    ],
    ids=str,
)
def test_blocks_arrive_whole_and_nothing_else_changes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rng = random.Random(0)
    pool = torch.randint(0, 255, (12, *shape)).to(dtype)
    slots = torch.randint(0, 255, (9, *shape)).to(dtype)
    sources, targets = (torch.tensor(rng.sample(range(9), 5)) for _ in range(2))
    expected = pool.clone()
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        expected[target] = slots[source]
    for function in (blocks.copy_blocks, entry.copy_blocks):
        out = pool.clone()
        function(out, targets, slots, sources)
        assert torch.equal(out, expected)


def test_within_one_pool() -> None:
    pool = torch.randn(6, 2, 40)
    expected = pool.clone()
    expected[[4, 5]] = pool[[1, 1]]
    blocks.copy_blocks(pool, torch.tensor([4, 5]), pool, torch.tensor([1, 1]))
    assert torch.equal(pool, expected)
    blocks.copy_blocks(pool, torch.empty(0, dtype=torch.int64), pool, torch.empty(0, dtype=torch.int64))
    assert torch.equal(pool, expected)


def test_blocks_of_different_shapes_are_refused() -> None:
    ids = torch.tensor([0])
    with pytest.raises(ValueError, match=r"blocks of \(3,\) torch.float32 do not fit those of \(4,\)"):
        entry.copy_blocks(torch.zeros(2, 4), ids, torch.zeros(2, 3), ids)
    with pytest.raises(ValueError, match="must lie behind each other"):
        blocks.copy_blocks(torch.zeros(4, 2).T, ids, torch.zeros(2, 4), ids)
