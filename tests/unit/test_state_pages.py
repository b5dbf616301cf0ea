"""The states of layers, read from pages and written to them."""

import pytest
import torch

from baton_kernels.kv_layout import KVGroup, StateKV
from baton_kernels.state_pages import LayerStates

KV = StateKV(units=2, size=3)
GROUP = KVGroup(KV, layers=(0, 3, 4, 7), tables=range(2, 5), per_page=3)
"""Eight cells, three in each page of ten numbers."""


@pytest.mark.parametrize("layer", range(4))
def test_a_state_is_read_from_the_cells_of_its_pages(layer: int) -> None:
    pages = torch.arange(60.0).view(6, 10)
    tables = [[4, 2, 5], [1, 3, 0]]
    read = LayerStates(pages, GROUP, layer).read(torch.tensor(tables))
    offsets = LayerStates(pages, GROUP, layer).offsets(torch.tensor(tables))
    for row, table in enumerate(tables):
        for unit in range(2):
            cell = 2 * layer + unit
            first = 10 * table[cell // 3] + 3 * (cell % 3)
            assert read[row, unit].tolist() == [first, first + 1, first + 2]
            assert offsets[row, unit] == first


def test_a_negative_source_is_zeros_whatever_page_0_has() -> None:
    states = LayerStates(torch.full((6, 10), float("nan")), GROUP, 1)
    sources = torch.tensor([[-1, -1, -1]])
    assert states.read(sources).tolist() == [[[0.0] * 3] * 2]
    assert states.offsets(sources).tolist() == [[-1, -1]]


def test_writing_touches_the_cells_of_named_targets_alone() -> None:
    pages = torch.zeros(6, 10)
    states = LayerStates(pages, GROUP, 1)
    written = torch.arange(1.0, 19.0).view(3, 2, 3)
    targets = torch.tensor([[4, 2, 5], [-1, -1, -1], [1, 3, 0]])
    states.write(targets, written)
    assert torch.equal(states.read(targets), written * torch.tensor([1.0, 0.0, 1.0])[:, None, None])
    assert pages.count_nonzero() == 12
