"""Paged attention against its float64 reference, over ragged batches and shuffled blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_kernels.attention import AttentionPlan, paged_attention, write_kv
from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.paged import PagedBatch
from baton_kernels.plain import PlainPlan
from baton_kernels.reference import reference_attention, reference_write_kv
from baton_kernels.step_attention import StepAttention
from baton_kernels.window import ChunkedWindow, Window
from tests.support.covering import Choice, covering
from tests.support.deep import all_deep_but
from tests.support.paged_steps import TOLERANCE, Case, lay_out, sinks_of

CASES = {
    "decode only": Case(4, 2, 64, 16, None, (1, 16, 17, 70), ()),
    "one chunk, fresh": Case(4, 4, 64, 16, None, (), ((0, 33),)),
    "chunk after an unaligned prefix": Case(8, 1, 96, 16, None, (), ((37, 21),)),
    "mixed": Case(6, 2, 64, 32, None, (40, 3, 129), ((0, 5), (31, 64), (100, 1))),
    "mixed, window": Case(8, 2, 64, 16, 20, (1, 19, 20, 21, 90), ((0, 50), (33, 40), (0, 20))),
    "window of one": Case(2, 2, 64, 16, 1, (1, 40), ((7, 20),)),
    "window of a block and one": Case(4, 2, 128, 16, 17, (16, 17, 18, 32, 33, 34), ((15, 18), (16, 17))),
    "window wider than all": Case(4, 1, 64, 64, 500, (63, 64, 65), ((10, 60), (0, 8))),
    "rows of very different contexts": Case(4, 2, 64, 16, None, (300, *range(1, 40), 200, 17), ((3, 20),)),
    "the same, window": Case(4, 2, 64, 16, 30, (300, *range(1, 40), 200, 17), ((3, 20),)),
    "nothing": Case(4, 2, 64, 16, None, (), ()),
    "bfloat16": Case(4, 2, 128, 16, 30, (7, 50), ((0, 40), (21, 13)), torch.bfloat16),
    "float16": Case(4, 2, 64, 16, None, (7, 50), ((0, 40), (21, 13)), torch.float16),
    "soft-cap": Case(4, 2, 64, 16, None, (7, 50), ((0, 40), (21, 13)), softcap=0.5),
    "longer than a share of decode and a block of keys": Case(
        6, 2, 64, 16, None, (513, 1100), ((0, 300), (511, 30)), torch.bfloat16
    ),
    "the same in float32, window": Case(4, 4, 32, 16, 600, (513, 1100), ((0, 300), (700, 30))),
    "soft-cap, window": Case(4, 2, 64, 16, 9, (7, 50), ((0, 40), (21, 13)), softcap=0.5),
}


def plain(batch: PagedBatch, pool: Tensor, windows: Collection[Window | None]) -> StepAttention:
    return PlainPlan.build(batch, pool, windows)


def native(batch: PagedBatch, pool: Tensor, windows: Collection[Window | None]) -> StepAttention:
    plan = CpuPlan.build(batch, pool)
    assert plan is not None, "this machine has no compiler, which the README asks for"
    return plan


LEVELS: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "dtype": (torch.float32, torch.bfloat16),
        "window": (None, 40, ChunkedWindow(1), ChunkedWindow(16), ChunkedWindow(23), ChunkedWindow(600)),
        "softcap": (None, 0.5, 20.0),
        "has_sinks": (False, True),
        "heads": (2, 6, 16),
        "head_dim": (64, 128),
        "block_size": (16, 64),
        "decode": ((), (3, 23, 24, 46, 47), (3, 600, 601, 1250)),
        "queries": (1, 3),
        "chunks": ((), ((0, 1), (0, 50)), ((21, 30), (560, 70))),
    }
)
"""The kinds of scores and windows, with contexts at the edges of runs, of blocks and of shares."""
Planner = Callable[[PagedBatch, Tensor, Collection[Window | None]], StepAttention]
PLANNERS: Mapping[str, Planner] = {"plain": plain, "native": native}


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    return Case(
        heads=kv_heads * rng.choice([1, 2, 3, 4, 8]),
        kv_heads=kv_heads,
        head_dim=rng.choice([64, 96, 128]),
        block_size=rng.choice([16, 32, 64]),
        window=rng.choice([None, rng.randint(1, 150)]),
        decode=tuple(rng.randint(1, 150) for _ in range(rng.choice([0, 1, 3, 6, 20, 40]))),
        chunks=tuple(
            (rng.choice([0, rng.randint(0, 120)]), rng.randint(1, 50)) for _ in range(rng.randint(0, 3))
        ),
    )


def check(case: Case, plan_of: Planner) -> None:
    torch.manual_seed(0)
    pool, batch = lay_out(case)
    tokens, layer, scale = batch.positions.numel(), 1, case.head_dim**-0.5
    q = torch.randn(tokens, case.heads, case.head_dim).to(case.dtype)
    k, v = torch.randn(2, tokens, case.kv_heads, case.head_dim).to(case.dtype)

    expected_pool = pool.clone()
    reference_write_kv(expected_pool, layer, k, v, batch)
    plan = AttentionPlan(plan_of(batch, pool, {case.window}))
    write_kv(pool, layer, k, v, plan)
    assert torch.equal(pool, expected_pool)

    how: dict[str, Any] = {"scale": scale, "window": case.window, "softcap": case.softcap}
    how["sinks"] = sinks_of(case)
    out = paged_attention(pool, layer, q, plan, **how)
    expected = reference_attention(pool, layer, q, batch, **how)
    assert out.shape == q.shape
    assert out.dtype == case.dtype
    own = torch.ones(tokens, dtype=torch.bool)
    own[: batch.num_decode] = batch.decode_contexts > 0  # rows of padding may get anything
    torch.testing.assert_close(out[own].double(), expected[own], rtol=0, atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("name", CASES)
def test_plain_torch_matches_the_reference(name: str) -> None:
    check(CASES[name], plain)


@pytest.mark.parametrize("name", [name for name in CASES if name != "float16"])
def test_native_kernels_match_the_reference(name: str) -> None:
    check(CASES[name], native)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("choice", covering(LEVELS))
def test_windows_and_scores_of_every_kind(choice: Choice, planner: str) -> None:
    how: dict[str, Any] = choice
    check(Case(kv_heads=2, **how), PLANNERS[planner])


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    ("window", "decode_first", "chunk_first"), [(30, 96, 64), (ChunkedWindow(50), 96, 48)]
)
def test_what_no_row_sees_is_not_read(
    window: Window, decode_first: int, chunk_first: int, planner: str
) -> None:
    """Decoding at 127 and a chunk from 97 on, with blocks of 16."""
    torch.manual_seed(0)
    pool, batch = lay_out(Case(4, 2, 64, 16, window, (128,), ((97, 20),)))
    q = torch.randn(21, 4, 64)
    expected = reference_attention(pool, 1, q, batch, scale=0.1, window=window)
    pool[0] = torch.nan
    pool[batch.decode_tables[0, : decode_first // 16]] = torch.nan
    pool[batch.chunks[0].table[: chunk_first // 16]] = torch.nan
    plan = AttentionPlan(PLANNERS[planner](batch, pool, {window}))
    out = paged_attention(pool, 1, q, plan, scale=0.1, window=window)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)


def test_sinks_that_would_be_misread() -> None:
    pool, batch = lay_out(CASES["decode only"])
    plan = AttentionPlan(native(batch, pool, {None}))
    q = torch.randn(batch.positions.numel(), 4, 64)
    for sinks in (torch.zeros(3), torch.zeros(4).bfloat16(), torch.zeros(1, 4)):
        with pytest.raises(ValueError, match=r"sinks are .*; allowed: \(4,\) torch\.float32"):
            paged_attention(pool, 0, q, plan, scale=0.1, window=None, sinks=sinks)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("seed", all_deep_but(15, range(40)))
def test_random_shapes(seed: int, planner: str) -> None:
    check(random_case(seed), PLANNERS[planner])


@pytest.mark.parametrize("seed", range(20))
def test_native_kernels_in_bfloat16(seed: int) -> None:
    check(replace(random_case(seed), dtype=torch.bfloat16), native)


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.float16, 64), (torch.bfloat16, 16), (torch.float32, 20), (torch.float32, 512)],
)
def test_what_is_left_to_plain_torch(
    dtype: torch.dtype, head_dim: int, caplog: pytest.LogCaptureFixture
) -> None:
    pool, batch = lay_out(Case(4, 2, head_dim, 16, None, (7,), (), dtype))
    assert CpuPlan.build(batch, pool) is None
    assert isinstance(AttentionPlan.build(batch, pool, {None}, 4).step, PlainPlan)
    assert f"attention over heads of {head_dim} {dtype} is left to plain torch" in caplog.text


def test_one_plan_serves_layers_with_different_windows() -> None:
    torch.manual_seed(0)
    case = CASES["mixed"]
    pool, batch = lay_out(case)
    plan = AttentionPlan.build(batch, pool, {None, 9}, case.heads)
    q = torch.randn(batch.positions.numel(), case.heads, case.head_dim)
    for layer, window in ((0, None), (2, 9)):
        out = paged_attention(pool, layer, q, plan, scale=0.1, window=window)
        expected = reference_attention(pool, layer, q, batch, scale=0.1, window=window)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)


def test_strided_inputs_are_fine() -> None:
    """Queries, keys and values arrive as slices of one fused projection."""
    torch.manual_seed(0)
    case = CASES["mixed"]
    pool, batch = lay_out(case)
    plan = AttentionPlan.build(batch, pool, {None}, case.heads)
    fused = torch.randn(batch.positions.numel(), case.heads + 2 * case.kv_heads, case.head_dim)
    q, k, v = torch.split(fused, [case.heads, case.kv_heads, case.kv_heads], dim=1)
    write_kv(pool, 0, k, v, plan)
    out = paged_attention(pool, 0, q, plan, scale=0.1, window=None)
    expected = reference_attention(pool, 0, q, batch, scale=0.1, window=None)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("contexts", [(40, 9, 5, 129), (40,)])
def test_a_sequence_may_have_several_rows(
    planner: str, window: int | None, contexts: tuple[int, ...]
) -> None:
    """Verified drafts give a sequence several rows. Rows of padding may get anything and do no harm."""
    torch.manual_seed(0)
    case = Case(4, 2, 64, 16, window, contexts, ((3, 20),), queries=5)
    pool, batch = lay_out(case)
    q = torch.randn(batch.positions.numel(), case.heads, case.head_dim)
    plan = AttentionPlan(PLANNERS[planner](batch, pool, {window}))
    out = paged_attention(pool, 1, q, plan, scale=0.1, window=window)
    expected = reference_attention(pool, 1, q, batch, scale=0.1, window=window)
    own = torch.cat([batch.decode_contexts > 0, torch.ones(20, dtype=torch.bool)])
    assert own.tolist().count(False) == len(contexts) // 2
    torch.testing.assert_close(out[own].double(), expected[own], rtol=0, atol=2e-5)
