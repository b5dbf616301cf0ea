"""The first shapes of ``loadtest.kernels --check`` for each kernel, and that its shapes hold all pairs."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import combinations, product

import pytest
import torch

from tests.support.covering import covering

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs them on the device", allow_module_level=True)

from loadtest.kernel_checks import ATTENTION, WrongError, check_all
from tests.support.interpreted import blocks


@pytest.mark.deep
def test_every_kernel_is_its_reference() -> None:
    checked = list(check_all(most=1))
    assert len(checked) == 19
    assert all(one.cases == 1 and 0 <= one.worst <= 1 for one in checked)


@pytest.mark.deep
def test_a_wrong_kernel_is_told_with_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "copy_blocks", lambda *args: None)
    with pytest.raises(WrongError, match=r"block copy differs .*'block_size'"):
        list(check_all(most=2))


def test_every_pair_of_values_is_in_a_row() -> None:
    rows = covering(ATTENTION)
    assert len(rows) < 100
    for a, b in combinations(ATTENTION, 2):
        assert {(row[a], row[b]) for row in rows} == set(product(ATTENTION[a], ATTENTION[b]))
