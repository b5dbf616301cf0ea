"""What a step launches, and that the count sees it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)

from loadtest.launches import Launches, StepShape, launches_in_pieces, launches_of, model_of
from loadtest.shapes import SHAPES

LAYERS = 2


def launches(step: StepShape) -> Launches:
    return launches_of(model_of(SHAPES["llama-tiny"]), step)


def test_a_view_is_no_launch_and_a_sum_is_one() -> None:
    a = torch.empty(4, 4, device="meta")
    with Launches() as counted:
        _ = a.view(16)[2:] + 1
    assert counted.operations == {"add": 1}


def test_attention_is_one_launch_a_layer_in_every_kind_of_step() -> None:
    assert launches(StepShape(decode=3)).kernels["decode"] == LAYERS
    assert launches(StepShape(decode=3, queries=5)).kernels["decode"] == LAYERS
    # The last layer computes only the rows that are wanted, as decoding rows.
    assert launches(StepShape(chunks=((0, 300),))).kernels["prefill"] == LAYERS - 1
    assert launches(StepShape(chunks=((700, 5),))).kernels == launches(StepShape(chunks=((0, 5),))).kernels


def test_a_decode_step_launches_nine_kernels_a_layer_and_few_more() -> None:
    """Four matmuls, and between them: norm and sum twice, rotation, attention, SiLU. Behind all, a norm."""
    counted = launches(StepShape(decode=3))
    assert counted.kernels == {
        "rotate_and_store": LAYERS,
        "decode": LAYERS,
        "gated_product": LAYERS,
        "add_norm": 2 * LAYERS + 1,
    }
    assert counted.operations["linear"] == 4 * LAYERS + 1
    assert counted.total <= 9 * LAYERS + 10


def test_what_a_step_launches_depends_on_no_number_of_sequences() -> None:
    few, many = (launches(StepShape(decode=n, chunks=((5, 3),) * n)).total for n in (2, 40))
    assert few == many


def test_a_step_in_pieces_launches_a_graph_and_attention_for_each_layer() -> None:
    counted = launches_in_pieces(model_of(SHAPES["llama-tiny"]), StepShape(decode=3, chunks=((0, 200),)))
    assert counted is not None
    assert counted.kernels == {"graph": LAYERS + 1, "decode": LAYERS, "prefill": LAYERS}
    assert counted.operations.total() < 15
