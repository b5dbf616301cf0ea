"""The Triton attention kernels against the float64 reference, under triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_kernels.reference import reference_attention
from baton_kernels.window import ChunkedWindow
from tests.support.covering import Choice, covering
from tests.support.deep import all_deep_but
from tests.support.paged_steps import TOLERANCE, Case, lay_out, sinks_of, spoil_unused

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs them on the device", allow_module_level=True)

from tests.support.interpreted import InterpreterBuilder, attention, shapes

FEW = shapes.Device(processors=3, arch=90)

CASES = {
    "decode only": Case(4, 2, 64, 16, None, (1, 16, 17, 70, 64, 65), ()),
    "one long context among short ones": Case(4, 2, 64, 32, None, (3, 4000, 1, 900), ()),
    "the same, window": Case(4, 2, 64, 32, 700, (3, 4000, 1, 900), ()),
    "one context, every program": Case(2, 1, 128, 64, None, (3000,), ()),
    "more rows than programs": Case(2, 2, 64, 16, None, tuple(range(1, 60, 3)), ()),
    "chunk behind a long prefix": Case(4, 1, 64, 64, None, (), ((3900, 70),)),
    "chunk behind a long prefix, window": Case(4, 1, 64, 64, 1000, (), ((3900, 70),)),
    "mixed": Case(6, 2, 96, 32, None, (40, 3, 129), ((0, 5), (31, 64), (100, 1))),
    "mixed, window": Case(8, 2, 64, 16, 20, (1, 19, 20, 21, 90), ((0, 50), (33, 40), (0, 20))),
    "window of one": Case(2, 2, 64, 16, 1, (1, 40), ((7, 20),)),
    "window of a tile": Case(4, 2, 64, 16, 64, (63, 64, 65, 200), ((0, 150), (64, 64))),
    "head_dim 256": Case(4, 2, 256, 16, 70, (7, 150), ((0, 40), (121, 13)), torch.float16),
    "head_dim 24": Case(4, 2, 24, 16, None, (7, 50), ((0, 40), (21, 13))),
    "sixteen heads to one": Case(16, 1, 128, 16, None, (7, 300), ((0, 70), (21, 3)), torch.float16),
    "seventeen heads to one": Case(17, 1, 64, 16, None, (7, 300), ((0, 70), (21, 3))),
    "bfloat16": Case(4, 2, 128, 16, 30, (7, 50), ((0, 40), (21, 13)), torch.bfloat16),
    "chunked window": Case(4, 2, 64, 16, ChunkedWindow(50), (50, 51, 500), ((0, 140), (48, 13))),
    "chunked window, soft-cap": Case(4, 2, 64, 16, ChunkedWindow(50), (51, 500), ((0, 140),), softcap=0.5),
    "soft-cap": Case(4, 2, 64, 16, None, (7, 500), ((0, 40), (21, 13)), softcap=0.5),
    "soft-cap, window": Case(4, 2, 64, 16, 50, (7, 500), ((0, 140), (21, 13)), softcap=0.5),
    "drafts of two sequences": Case(8, 2, 64, 16, None, (30,), ((60, 2), (29, 2))),
    "drafts in a uniform step": Case(8, 2, 64, 16, None, (60, 7, 700, 33), (), queries=5),
    "drafts in a uniform step, window": Case(8, 2, 64, 16, 50, (60, 7, 700, 33), (), queries=5),
    "the same, a window of one": Case(8, 2, 64, 16, 1, (60, 7, 700, 33), (), queries=3),
    "the same beside chunks": Case(4, 4, 64, 32, None, (5, 4000), ((30, 70), (3, 9), (900, 1)), queries=2),
    "drafts, sixty-four rows to one": Case(8, 1, 128, 16, 40, (300, 20), (), torch.bfloat16, queries=8),
    "short chunks behind long prefixes": Case(4, 2, 64, 16, None, (9,), ((2000, 5), (0, 14), (500, 12))),
    "short chunks, window": Case(4, 2, 64, 16, 70, (9,), ((2000, 5), (0, 14), (500, 12))),
    "short chunks of seven heads to one": Case(7, 1, 64, 16, None, (), ((90, 1), (300, 9), (0, 2))),
    "a long chunk split over programs": Case(2, 1, 64, 64, None, (), ((3900, 70),), torch.float16),
    "the same, window, soft-cap": Case(2, 1, 64, 64, 2500, (), ((3900, 70),), torch.float16, 20.0),
    "nothing": Case(4, 2, 64, 16, None, (), ()),
}


def check(case: Case, device: shapes.Device = FEW) -> None:
    torch.manual_seed(0)
    pool, batch = lay_out(case)
    layer, scale = 1, 2 * case.head_dim**-0.5
    fused = torch.randn(batch.positions.numel(), case.heads + 2, case.head_dim).to(case.dtype)
    q = fused[:, : case.heads]
    how = {"scale": scale, "window": case.window, "softcap": case.softcap, "sinks": sinks_of(case)}
    plan = attention.CudaPlan.build(batch, pool, {case.window}, case.heads, device)
    out = plan.attend(spoil_unused(pool, batch, layer), layer, q, **how)
    expected = reference_attention(pool, layer, q, batch, **how)
    assert out.shape == q.shape
    assert out.dtype == case.dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("name", all_deep_but(1, CASES))
def test_matches_the_reference(name: str) -> None:
    check(CASES[name])


FEATURES: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "window": (None, 45, ChunkedWindow(1), ChunkedWindow(45), ChunkedWindow(64)),
        "softcap": (None, 0.5),
        "step": ("decode", "verify", "short chunks", "prefill", "prefill, split"),
    }
)
STEPS: Mapping[str, Case] = MappingProxyType(
    {
        "decode": Case(4, 2, 64, 16, None, (1, 64, 65, 90, 700), ()),
        "verify": Case(4, 2, 64, 16, None, (5, 47, 92, 700), (), queries=4),
        "short chunks": Case(4, 2, 64, 16, None, (), ((0, 5), (43, 5), (700, 14))),
        "prefill": Case(4, 2, 64, 16, None, (), ((0, 100), (37, 60))),
        "prefill, split": Case(2, 1, 64, 16, None, (), ((200, 40),)),
    }
)


@pytest.mark.parametrize(
    "choice", all_deep_but(3, covering(FEATURES)), ids=lambda choice: "-".join(map(str, choice.values()))
)
def test_windows_and_soft_caps_match_the_reference_beside_sinks(choice: Choice) -> None:
    how: dict[str, Any] = {name: choice[name] for name in ("window", "softcap")}
    case = replace(STEPS[str(choice["step"])], **how, has_sinks=True)
    check(case, shapes.Device(6, 90))


@pytest.mark.deep
def test_a_sink_that_outweighs_everything_leaves_nothing() -> None:
    pool, batch = lay_out(Case(4, 2, 64, 16, None, (700,), ((0, 5), (0, 40))))
    plan = attention.CudaPlan.build(batch, pool, {None}, 4, FEW)
    q, sinks = torch.randn(46, 4, 64), torch.tensor([-1e30, 0.0, 1e30, 1e30])
    out = plan.attend(pool, 0, q, scale=0.1, window=None, softcap=None, sinks=sinks)
    without = plan.attend(pool, 0, q, scale=0.1, window=None, softcap=None)
    assert torch.equal(out[:, 2:], torch.zeros(46, 2, 64))
    torch.testing.assert_close(out[:, 0], without[:, 0])
    assert (out[:, 1].abs() < without[:, 1].abs()).all()


@pytest.mark.parametrize(
    ("sinks", "says"),
    [
        (torch.zeros(3), r"\(3,\) torch.float32; allowed: contiguous \(4,\) float32"),
        (torch.zeros(4).half(), r"\(4,\) torch.float16"),
        (torch.zeros(8)[::2], r"\(4,\) torch.float32; allowed: contiguous"),
    ],
)
def test_sinks_that_the_kernels_cannot_read_are_an_error(sinks: Tensor, says: str) -> None:
    pool, batch = lay_out(Case(4, 2, 64, 16, None, (5,), ()))
    plan = attention.CudaPlan.build(batch, pool, {None}, 4, FEW)
    with pytest.raises(ValueError, match=says):
        plan.attend(pool, 0, torch.zeros(1, 4, 64), scale=0.1, window=None, softcap=None, sinks=sinks)


@pytest.mark.parametrize(
    ("decode", "chunks", "tiles"),
    all_deep_but(
        1,
        [
            ((3990,), (), 17),
            ((3001,), (), 1),
            ((3000,), (), 16),
            ((), ((3985, 5),), 17),
            ((), ((3000, 70),), 2),
        ],
    ),
    ids=["decode", "first of a run", "last of a run", "short chunk", "prefill"],
)
def test_only_the_tiles_of_a_run_are_read(
    decode: tuple[int, ...],
    chunks: tuple[tuple[int, int], ...],
    tiles: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs of 1000 tokens, in tiles of 64: the token 3000 is in tile 46."""
    products = 0
    dot = InterpreterBuilder.create_dot

    def counted(*args: Any) -> Any:
        nonlocal products
        products += 1
        return dot(*args)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    window = ChunkedWindow(1000)
    pool, batch = lay_out(Case(1, 1, 64, 64, window, decode, chunks, torch.float16))
    plan = attention.CudaPlan.build(batch, pool, {window}, 1, FEW)
    q = torch.randn(batch.positions.numel(), 1, 64).half()
    plan.attend(pool, 0, q, scale=0.1, window=window, softcap=None)
    assert products == 2 * tiles  # a product with the keys, and one with the values


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    return Case(
        heads=kv_heads * rng.choice([1, 2, 3, 4, 5, 8, 16]),
        kv_heads=kv_heads,
        head_dim=rng.choice([64, 96, 128, 256]),
        block_size=rng.choice([16, 32, 64]),
        window=rng.choice([None, rng.randint(1, 300)]),
        decode=tuple(rng.randint(1, 400) for _ in range(rng.choice([0, 1, 3, 6]))),
        chunks=tuple(
            (rng.choice([0, rng.randint(0, 200)]), rng.randint(1, 90)) for _ in range(rng.randint(0, 3))
        ),
        dtype=rng.choice([torch.float32, torch.float16, torch.bfloat16]),
        softcap=rng.choice([None, None, 0.5, 20.0]),
    )


@pytest.mark.parametrize("seed", all_deep_but(1, range(16)))
def test_matches_the_reference_on_random_shapes(seed: int) -> None:
    rng = random.Random(seed)
    check(random_case(seed), shapes.Device(processors=rng.randint(1, 40), arch=rng.choice([80, 90])))


def test_rows_without_a_context_get_zeros() -> None:
    """As those have that pad a batch to the size of a captured graph."""
    pool, batch = lay_out(Case(4, 2, 64, 16, None, (5, 300, 9), ()))
    batch.decode_contexts[1] = 0
    plan = attention.CudaPlan.build(batch, pool, {None, 7}, 4, FEW)
    q = torch.randn(3, 4, 64)
    for window in (None, 7):
        out = plan.attend(pool, 0, q, scale=0.1, window=window, softcap=None)
        assert torch.equal(out[1], torch.zeros(4, 64))
        for row, context in ((0, 5), (2, 9)):
            assert batch.decode_contexts[row] == context
            assert out[row].isfinite().all()
            assert out[row].any()


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "arch", "says"),
    [
        (4, 512, torch.float16, 90, "head_dim is 512: at most 256"),
        (4, 64, torch.float64, 90, "a pool of torch.float64"),
        (130, 64, torch.float16, 90, "65 query heads for each KV head: at most 64"),
        (4, 64, torch.float16, 75, "compute capability is 7.5: at least 8.0"),
    ],
)
def test_what_the_kernels_cannot_do_is_an_error(
    heads: int, head_dim: int, dtype: torch.dtype, arch: int, says: str
) -> None:
    pool, batch = lay_out(Case(heads, 2, head_dim, 16, None, (5,), (), dtype))
    q = torch.randn(1, heads, head_dim).to(dtype)
    with pytest.raises(ValueError, match=says):
        plan = attention.CudaPlan.build(batch, pool, {None}, heads, shapes.Device(3, arch))
        plan.attend(pool, 0, q, scale=0.1, window=None, softcap=None)


def test_the_grid_and_the_workspace_depend_on_no_length() -> None:
    """Or a captured graph would hold only for the lengths it was captured with."""
    plans = []
    for contexts in ((5, 5, 5), (300, 1, 2000)):
        pool, batch = lay_out(Case(4, 2, 64, 16, None, contexts, ()))
        plans.append(attention.CudaPlan.build(batch, pool, {None}, 4, FEW).decode[None])
    assert plans[0].programs == plans[1].programs
    assert plans[0].starts.shape == plans[1].starts.shape


@pytest.mark.deep
@pytest.mark.parametrize(
    "case",
    [
        Case(4, 2, 64, 16, None, (3, 4000, 1, 900), ()),
        Case(4, 2, 64, 16, None, (8, 4000, 5, 900), (), queries=5),
        Case(4, 2, 64, 16, None, (), ((2000, 5), (0, 9))),
        Case(2, 1, 64, 64, None, (), ((3900, 70),), torch.float16),
    ],
    ids=["decode", "verify", "short chunks", "a long chunk"],
)
def test_parts_are_joined_again_in_every_layer(case: Case) -> None:
    """The counters of parts are back at 0 after each launch: a plan, or a graph, is used again and again."""
    torch.manual_seed(0)
    pool, batch = lay_out(case)
    plan = attention.CudaPlan.build(batch, pool, {case.window}, case.heads, FEW)
    q = torch.randn(batch.positions.numel(), case.heads, case.head_dim).to(case.dtype)
    parts = plan.prefill or next(iter((plan.decode or plan.short).values()))
    for layer in (0, 2, 0):
        out = plan.attend(pool, layer, q, scale=0.1, window=None, softcap=None)
        expected = reference_attention(pool, layer, q, batch, scale=0.1, window=None)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[case.dtype])
        assert parts.arrivals is not None
        assert not parts.arrivals.any()


def test_a_chunk_of_a_few_queries_is_split_as_decode_is() -> None:
    """A verification of five tokens behind a long context has as many programs as a decoding row."""
    pool, batch = lay_out(Case(8, 2, 64, 16, None, (2000,), ((2000, 5), (0, 40), (0, 3))))
    plan = attention.CudaPlan.build(batch, pool, {None}, 8, shapes.Device(40, 90))
    short = plan.short[None]
    assert short.programs == plan.decode[None].programs == 40
    assert (short.starts.numel() - 1, short.queries) == (2, 8)
    assert plan.prefill is not None
    assert plan.prefill.chunks.shape == (4, 2)


def test_a_chunk_behind_a_long_context_fills_the_device() -> None:
    pool, batch = lay_out(Case(2, 1, 64, 64, None, (), ((3900, 70),), torch.float16))
    plan = attention.CudaPlan.build(batch, pool, {None}, 2, shapes.Device(16, 90))
    assert plan.prefill is not None
    assert plan.prefill.programs < 4
    assert plan.prefill.programs * plan.prefill.splits >= 16
