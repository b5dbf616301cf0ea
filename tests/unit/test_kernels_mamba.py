"""Mamba-2 and short convolutions over states in pages, by every kernel there is, against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from baton_kernels.causal_conv import ConvWeights, short_conv
from baton_kernels.cpu import library
from baton_kernels.kv_layout import KVGroup, StateKV
from baton_kernels.mamba import gated_norm, gated_squares, mamba
from baton_kernels.mamba_sizes import MambaSizes
from baton_kernels.mamba_weights import GatedNorm, MambaWeights
from baton_kernels.paged import StateRows, StateSegment
from baton_kernels.reference import reference_convolved, reference_gated_norm, reference_scan
from baton_kernels.state_pages import LayerStates

pytestmark = pytest.mark.deep

SIZES = {
    "whole vectors": MambaSizes(units=2, heads=3, head_dim=64, groups=2, state_dim=128, conv_kernel=4),
    "odd": MambaSizes(units=3, heads=2, head_dim=10, groups=3, state_dim=7, conv_kernel=3),
    "units of one group": MambaSizes(units=4, heads=1, head_dim=8, groups=2, state_dim=16, conv_kernel=4),
    "groups of one unit": MambaSizes(units=1, heads=6, head_dim=12, groups=3, state_dim=18, conv_kernel=2),
}
NONE = -1


@pytest.fixture(autouse=True, params=["native", "plain"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(library.SWITCH, request.param)
    library.native.cache_clear()
    yield
    library.native.cache_clear()


class Pool:
    """States of two layers in pages that hold two cells each, full of NaN where nothing was written."""

    def __init__(self, units: int, size: int) -> None:
        group = KVGroup(StateKV(units, size), (0, 1), range(units), 2)
        self.states = LayerStates(torch.full((64, 2 * size + 5), float("nan")), group, 1)
        self._free = torch.randperm(63, generator=torch.Generator().manual_seed(0)) + 1
        self.width = units

    def pages(self) -> Tensor:
        """Pages of one state."""
        taken, self._free = self._free.split_with_sizes([self.width, len(self._free) - self.width])
        return taken

    @property
    def nowhere(self) -> Tensor:
        return torch.full((self.width,), NONE)


def rows_of(
    pool: Pool,
    decode: list[tuple[Tensor, list[Tensor]]] = [],  # noqa: B006 - only read
    segments: list[tuple[int, Tensor, Tensor]] = [],  # noqa: B006
) -> StateRows:
    """``decode``: each sequence's source, and the targets of its rows. ``segments``: length, source and
    target of each."""
    start, made = sum(len(targets) for _, targets in decode), []
    for length, source, target in segments:
        made.append(StateSegment(start, length, source, target))
        start += length
    sources = [source for source, _ in decode]
    targets = [target for _, each in decode for target in each]
    empty = torch.zeros((0, pool.width), dtype=torch.int64)
    return StateRows(
        torch.stack(sources) if sources else empty, torch.stack(targets) if targets else empty, tuple(made)
    )


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def weights_of(sizes: MambaSizes, limits: tuple[float, float] = (0.0, float("inf"))) -> MambaWeights:
    torch.manual_seed(1)
    heads, channels = sizes.units * sizes.heads, sizes.units * sizes.unit_channels
    conv = torch.randn(sizes.conv_kernel, channels) * 0.5
    bias = torch.randn(channels) * 0.3
    # Units of one group have the same weights for its B and C.
    inner, *_ = sizes.channels
    by_unit = [t.view(-1, sizes.units, sizes.unit_channels) for t in (conv, bias)]
    for unit in range(sizes.units):
        first = next(u for u in range(sizes.units) if sizes.first_group(u) == sizes.first_group(unit))
        for each in by_unit:
            each[:, unit, inner:] = each[:, first, inner:]
    a_log = torch.linspace(0, 2.5, heads)
    return MambaWeights(ConvWeights(conv, bias), a_log, torch.randn(heads), torch.randn(heads), limits)


def reference(projected: Tensor, weights: MambaWeights, sizes: MambaSizes) -> Tensor:
    """The outputs of one sequence from its beginning, head by head."""
    groups = sizes.groups * sizes.state_dim
    heads = sizes.units * sizes.heads
    parts = [sizes.inner, sizes.inner, groups, groups, heads]
    _, x, b, c, dt = projected.double().split_with_sizes(parts, dim=-1)
    inner, of_groups, _ = sizes.channels
    outs = []
    for head in range(heads):
        unit, of_unit = divmod(head, sizes.heads)
        group = head * sizes.groups // heads
        local = (group - sizes.first_group(unit)) * sizes.state_dim
        here = unit * sizes.unit_channels

        def mixed(part: Tensor, column: int, channel: int, size: int) -> Tensor:
            conv, at = weights.conv, slice(channel, channel + size)
            assert conv.bias is not None
            kept = torch.zeros(sizes.conv_kernel - 1, size)
            own = part[:, column : column + size]
            out, _ = reference_convolved(own, kept, conv.weight[:, at], conv.bias[at])
            return out / (1 + torch.exp(-out))

        dim, n = sizes.head_dim, sizes.state_dim
        xs = mixed(x, head * dim, here + of_unit * dim, dim)
        bs = mixed(b, group * n, here + inner + local, n)
        cs = mixed(c, group * n, here + inner + of_groups + local, n)
        steps = torch.log1p(torch.exp(dt[:, head] + weights.dt_bias[head])).clamp(*weights.dt_limits)
        a = -weights.a_log[head].double().exp()
        state = torch.zeros(1, dim, n)
        out, _ = reference_scan(
            xs[:, None], steps[:, None], a[None], bs[:, None], cs[:, None], weights.d[head][None], state
        )
        outs.append(out[:, 0])
    return torch.cat(outs, dim=-1)


Layer = Callable[[Tensor, StateRows], Tensor]


def mamba_layer(sizes: MambaSizes, weights: MambaWeights) -> tuple[Pool, Layer]:
    kept = (sizes.conv_kernel - 1) * sizes.unit_channels
    pool = Pool(sizes.units, sizes.state_size + kept)

    def compute(projected: Tensor, rows: StateRows) -> Tensor:
        return mamba(projected, weights, sizes, pool.states, rows)

    return pool, compute


def check_every_way(make: Callable[[], tuple[Pool, Layer]], inputs: Tensor, expected: Tensor) -> None:
    """Whole, in segments, and decoded with drafts, of which some are refused."""
    length = len(inputs)
    for cuts in ([], [1], [2, 3], [63, 64, 65], [100]):
        pool, compute = make()
        at, source, segments = 0, pool.nowhere, []
        for cut in [*(cut for cut in cuts if cut < length), length]:
            target = pool.pages()
            segments.append((cut - at, source, target))
            at, source = cut, target
        close(compute(inputs, rows_of(pool, segments=segments)), expected)
    pool, compute = make()
    source = pool.pages()
    half = length // 2
    close(compute(inputs[:half], rows_of(pool, segments=[(half, pool.nowhere, source)])), expected[:half])
    for at in range(half, half + 4):  # in place
        close(compute(inputs[at : at + 1], rows_of(pool, [(source, [source])])), expected[at : at + 1])
    at, drafts = half + 4, [pool.pages(), pool.pages(), pool.nowhere]
    out = compute(inputs[at : at + 3], rows_of(pool, [(source, drafts)]))
    close(out[:2], expected[at : at + 2])
    assert (out[2] == 0).all()
    for state in drafts[:2]:  # the second draft is refused, and then it is not
        at += 1
        out = compute(
            inputs[[at, 0, at]],
            rows_of(
                pool, [(state, [pool.pages()])], [(1, pool.nowhere, pool.pages()), (1, state, pool.pages())]
            ),
        )
        close(out[0], expected[at])
        close(out[1], expected[0])
        close(out[2], expected[at])


@pytest.mark.parametrize("name", SIZES)
def test_mamba(name: str) -> None:
    sizes = SIZES[name]
    weights = weights_of(sizes)
    inputs = torch.randn(150, sizes.columns, generator=torch.Generator().manual_seed(2))
    check_every_way(functools.partial(mamba_layer, sizes, weights), inputs, reference(inputs, weights, sizes))


def test_steps_have_limits() -> None:
    sizes = SIZES["odd"]
    weights = weights_of(sizes, (0.4, 0.9))
    inputs = torch.randn(30, sizes.columns, generator=torch.Generator().manual_seed(2))
    expected = reference(inputs, weights, sizes)
    pool, compute = mamba_layer(sizes, weights)
    source = pool.pages()
    close(compute(inputs[:29], rows_of(pool, segments=[(29, pool.nowhere, source)])), expected[:29])
    close(compute(inputs[29:], rows_of(pool, [(source, [source])])), expected[29:])
    assert not torch.allclose(expected, reference(inputs, weights_of(sizes), sizes), atol=1e-2)


def test_states_that_fade_at_once_and_never() -> None:
    """Decays from almost 1 to far below what float32 holds."""
    sizes = SIZES["whole vectors"]
    heads = sizes.units * sizes.heads
    weights = weights_of(sizes)
    extreme = MambaWeights(
        weights.conv,
        torch.linspace(-12, 6, heads),
        weights.d,
        torch.linspace(-6, 30, heads),
        weights.dt_limits,
    )
    inputs = torch.randn(200, sizes.columns, generator=torch.Generator().manual_seed(2))
    expected = reference(inputs, extreme, sizes)
    pool, compute = mamba_layer(sizes, extreme)
    got = compute(inputs, rows_of(pool, segments=[(200, pool.nowhere, pool.pages())]))
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize(("channels", "taps", "units"), [(64, 3, 2), (30, 4, 3), (9, 2, 1)])
def test_short_convolutions(channels: int, taps: int, units: int) -> None:
    torch.manual_seed(0)
    conv = ConvWeights(torch.randn(taps, channels), torch.randn(channels))
    inputs = torch.randn(130, 3 * channels)
    b, c, x = inputs.double().chunk(3, dim=-1)
    expected, _ = reference_convolved(b * x, torch.zeros(taps - 1, channels), conv.weight, conv.bias)

    def make() -> tuple[Pool, Layer]:
        pool = Pool(units, channels // units * (taps - 1))
        return pool, lambda rows, of: short_conv(rows, conv, pool.states, of)

    check_every_way(make, inputs, expected * c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize(("size", "groups"), [(64, 2), (27, 3), (33, 1)])
def test_gated_norms(size: int, groups: int, gate_first: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y, gate, weight = torch.randn(5, size), torch.randn(5, 2 * size)[:, size:], torch.randn(size)
    expected = reference_gated_norm(y, gate, weight, 1e-5, groups, gate_first)
    norm = GatedNorm(weight, 1e-5, groups, size // groups, gate_first)
    rtol = 1e-5 if dtype == torch.float32 else 5e-3
    squares = gated_squares(y, gate, norm)
    for given in (None, squares):
        got = gated_norm(y.clone(), gate, norm, dtype, given)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=1e-5)
    whole = GatedNorm(weight, 1e-5, groups, 4 * size // groups, gate_first)
    quarter = gated_norm(y.clone(), gate, whole, torch.float32, 4 * squares)
    torch.testing.assert_close(quarter.double(), expected, rtol=1e-5, atol=1e-5)
    bare = gated_norm(y.clone(), gate, GatedNorm(None, 1e-5, 1, size, gate_first), torch.float32)
    torch.testing.assert_close(bare.double(), reference_gated_norm(y, gate, None, 0, 1, True))
