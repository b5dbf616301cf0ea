"""A layer of Kimi delta attention alone, with decays and gates of full rank and bounded decays, against
transformers'."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import BailingHybridConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention

from baton.models.config import ModelConfig
from baton.models.delta_attention import DeltaAttention
from baton.models.mixer_config import DeltaConfig
from baton.models.model_step import States, Step
from baton.models.quantization.plain import PLAIN
from baton.parallel.collectives import Parallel
from tests.support.delta_cases import PagedStates
from tests.support.published_states import PUBLISHED_STATES

HIDDEN, HEADS, DIM = 64, 4, 32


def theirs(bound: float | None) -> BailingHybridDeltaAttention:
    config = BailingHybridConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        head_dim=DIM,
        num_hidden_layers=2,
        layer_types=["linear_attention"] * 2,
        kda_safe_gate=bound is not None,
        kda_lower_bound=bound or -1.0,
        rms_norm_eps=1e-4,
    )
    layer = BailingHybridDeltaAttention(config, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    return layer


def ours(layer: BailingHybridDeltaAttention, bound: float | None) -> DeltaAttention:
    sizes = DeltaConfig(
        "kda",
        key_heads=HEADS,
        value_heads=HEADS,
        key_dim=DIM,
        value_dim=DIM,
        conv_kernel=4,
        gate="sigmoid",
        lower_bound=bound,
    )
    kimi = ModelConfig.from_dict(PUBLISHED_STATES["Kimi-Linear-48B-A3B-Instruct"])
    config = replace(kimi, hidden_size=HIDDEN, norm_eps=1e-4, delta=sizes)
    mixer = DeltaAttention(config, 0, torch.float32, Parallel.alone(config), PLAIN)
    tensors = {name.replace("forget_gate.", ""): tensor for name, tensor in layer.state_dict().items()}
    for part, tensor in zip("qkv", tensors.pop("conv1d.weight").chunk(3), strict=True):
        tensors[f"{part}_conv1d.weight"] = tensor
    assert mixer.in_proj.weights is not None and mixer.out_proj.weights is not None
    places = mixer.places()
    for linear in (mixer.in_proj, mixer.out_proj):
        assert linear.weights is not None
        places |= {f"{name}.weight": part["weight"] for name, part in linear.weights.places().items()}
    assert places.keys() == tensors.keys()
    for name, place in places.items():
        place.load(tensors[name])
    mixer.in_proj.pack()
    mixer.out_proj.pack()
    return mixer


@pytest.mark.parametrize("bound", [None, -5.0])
def test_full_rank_gates_are_those_of_transformers(bound: float | None) -> None:
    torch.manual_seed(0)
    layer, x = theirs(bound), torch.randn(40, HIDDEN)
    mixer = ours(layer, bound)
    paged = PagedStates.of(mixer.layer)
    mixer.place = replace(mixer.place, index=paged.states.layer)
    table = paged.table()

    def step(rows: Tensor, source: Tensor) -> Tensor:
        state_rows = paged.rows([], [(len(rows), source, table)])
        states = States(paged.states.pages, state_rows, paged.states.group)
        found: Tensor = mixer(rows, Step((), (), (), states=states), None)
        return found

    with torch.inference_mode():
        got = torch.cat((step(x[:23], paged.none), step(x[23:], table)))
        torch.testing.assert_close(got, layer(x[None])[0], rtol=1e-4, atol=1e-4)
