"""What every quantization scheme does for a layer, whatever it keeps."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import get_args

import pytest
import torch
from torch import Tensor

from baton.models.layers import GatedLinear, Linear
from baton.models.quantization.base import QuantizationScheme
from baton.models.quantization.registry import SCHEMES, Quantization
from baton.models.quantization.rounded import RoundedPlace
from baton_kernels.cpu.linear import PackedWeight

INPUTS = 48
ROWS = {"q_proj": 40, "k_proj": 12, "v_proj": 12}


def scheme_of(name: Quantization) -> QuantizationScheme:
    scheme: QuantizationScheme = resolve_name(SCHEMES[name])
    return scheme


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> QuantizationScheme:
    return scheme_of(request.param)


def checkpoint() -> dict[str, dict[str, Tensor]]:
    """Tensors of whole projections, whose rows differ in size."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * torch.arange(1, shape[0] + 1).view(
            -1, *[1] * (len(shape) - 1)
        )

    return {name: {"weight": drawn(rows, INPUTS), "bias": drawn(rows)} for name, rows in ROWS.items()}


def load(layer: Linear, tensors: dict[str, dict[str, Tensor]]) -> None:
    assert layer.weights is not None
    for part, places in layer.weights.places().items():
        for kind, place in places.items():
            place.load(tensors[part][kind])


def test_each_name_has_its_scheme() -> None:
    assert ("auto", *SCHEMES) == get_args(Quantization)
    assert [scheme_of(name).name for name in SCHEMES] == list(SCHEMES)


def test_places_fill_every_weight_once(scheme: QuantizationScheme) -> None:
    layer = Linear(INPUTS, ROWS, torch.float32, bias=True, scheme=scheme)
    assert layer.weights is not None
    places = [place for part in layer.weights.places().values() for place in part.values()]
    for parameter in layer.parameters():
        parameter.copy_(torch.zeros_like(parameter))
    for place in places:
        for filled in (place.tensor, *([place.scales] if isinstance(place, RoundedPlace) else [])):
            filled.copy_(filled.float() + 1)
    assert list(layer.weights.places()) == list(ROWS)
    assert all((parameter.float() == 1).all() for parameter in layer.parameters())


@pytest.mark.parametrize("gated", [False, True])
def test_packed_weights_multiply_as_plain_torch_does(scheme: QuantizationScheme, gated: bool) -> None:
    make = GatedLinear if gated else Linear
    layer = make(INPUTS, ROWS["q_proj"], torch.float32, bias=True, scheme=scheme)
    tensors = checkpoint()["q_proj"]
    load(layer, dict.fromkeys(("", "gate_proj", "up_proj"), tensors))
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(2))
    before = layer(x)
    layer.pack()
    assert layer.packed is not None
    assert not list(layer.parameters()), "a plain one is kept"
    torch.testing.assert_close(layer(x), before, rtol=1e-4, atol=1e-3)


def test_a_rank_multiplies_with_its_part_of_what_one_rank_has(scheme: QuantizationScheme) -> None:
    tensors = checkpoint()
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(2))
    whole = Linear(INPUTS, ROWS, torch.float32, bias=True, scheme=scheme)
    load(whole, tensors)
    rows = {"q_proj": range(20, 40), "k_proj": range(6, 12), "v_proj": range(6, 12)}
    part = Linear(INPUTS, rows, torch.float32, bias=True, scheme=scheme)
    load(part, tensors)
    expected = torch.cat(
        [
            chunk[:, rows[name].start :]
            for name, chunk in zip(ROWS, whole(x).split(tuple(ROWS.values()), 1), strict=True)
        ],
        dim=1,
    )
    torch.testing.assert_close(part(x), expected, rtol=1e-5, atol=1e-4)
    # Columns: the parts' products add up to the whole's.
    left, right = (
        Linear(columns, ROWS["q_proj"], torch.float32, scheme=scheme)
        for columns in (range(20), range(20, INPUTS))
    )
    for layer in (left, right):
        load(layer, {"": tensors["q_proj"]})
    plain = Linear(INPUTS, ROWS["q_proj"], torch.float32, scheme=scheme)
    load(plain, {"": tensors["q_proj"]})
    torch.testing.assert_close(left(x[:, :20]) + right(x[:, 20:]), plain(x), rtol=1e-5, atol=1e-3)


def test_a_tied_head_multiplies_with_what_was_loaded(scheme: QuantizationScheme) -> None:
    weight = torch.nn.Parameter(checkpoint()["q_proj"]["weight"], requires_grad=False)
    loaded = Linear(INPUTS, ROWS["q_proj"], torch.float32, scheme=scheme)
    load(loaded, {"": checkpoint()["q_proj"]})
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(scheme.tied(weight).multiply(x), loaded(x))
    assert torch.equal(weight, checkpoint()["q_proj"]["weight"])


def test_weights_that_nothing_packs_stay(scheme: QuantizationScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedWeight, "of", lambda *args, **options: None)
    layer = Linear(INPUTS, ROWS, torch.float32, bias=True, scheme=scheme)
    load(layer, checkpoint())
    x = torch.randn(1, INPUTS, generator=torch.Generator().manual_seed(2))
    before = layer(x)
    layer.pack()
    assert layer.packed is None
    assert torch.equal(layer(x), before)
    assert layer.multiplier.multiply(x, torch.bfloat16).dtype == torch.bfloat16
