"""Every family, split every way, against transformers. The ranks are threads here, over groups of gloo."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.models.base import CausalLM
from baton.models.loader import load_model
from baton.parallel import collectives
from baton.process.options import ModelError
from baton_kernels.cpu.linear import PackedWeight
from tests.support.deep import all_deep_but
from tests.support.exact import alike, assert_same, exact_logits
from tests.support.model_ring import Ring, prompt
from tests.support.rank_threads import in_ranks
from tests.support.tiny_models import ModelDir, oracle_logits, save_llama

SPLITS = {"tp2": (2, 1), "pp2": (1, 2), "pp3": (1, 3), "tp2-pp2": (2, 2), "tp4": (4, 1)}
FAMILIES = (
    "llama",
    "llama-uneven",
    "llama-tied-mha",
    "llama-biased-mqa",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-biased-window",
)
CASES = [
    (name, split)
    for name in FAMILIES
    for split in ("tp2", "pp2", "tp2-pp2", "tp4")
    if (name, split) != ("qwen3-biased-window", "tp4")  # six heads
]
CASES.append(("llama-uneven", "pp3"))  # a stage in the middle


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for a rank that failed, and is a thread that the others cannot see the end of."""
    monkeypatch.setattr(collectives, "LONGEST", timedelta(seconds=20))


@pytest.fixture(scope="module")
def model_dir(model_dir: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    """And one model of which nothing but the heads can be split evenly."""
    uneven = tmp_path_factory.mktemp("uneven") / "llama-uneven"

    def build(name: str) -> Path:
        if name != uneven.name:
            return model_dir(name)
        return uneven if uneven.exists() else save_llama(uneven, vocab_size=323, intermediate_size=113)

    return build


def steps(model: CausalLM, a: list[int], b: list[int]) -> dict[str, Tensor]:
    """The logits of all tokens of two sequences: chunks, mixed steps, both decoding."""
    ring = Ring(model)
    done = [
        ring.step(chunks=[("a", a[:7]), ("b", b[:40])]),
        ring.step([("a", a[7])], [("b", b[40:56])]),
        ring.step(chunks=[("a", a[8:50]), ("b", b[56:60])]),
        *(ring.step([("b", b[60 + i]), ("a", a[50 + i])]) for i in range(10)),
    ]
    return {name: torch.cat([step[name] for step in done if name in step]) for name in "ab"}


@pytest.mark.parametrize(("name", "split"), all_deep_but(4, CASES))
def test_logits_are_those_of_transformers(name: str, split: str, model_dir: ModelDir) -> None:
    tp_size, pp_size = SPLITS[split]
    path, a, b = model_dir(name), prompt(60, seed=1), prompt(70, seed=2)
    leader, *_ = in_ranks(path, tp_size, pp_size, lambda model: steps(model, a, b))
    assert_same(leader["a"], exact_logits(path, a))
    assert_same(leader["b"], exact_logits(path, b))


def test_each_rank_has_its_part_alone(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedWeight, "of", lambda *args, **options: None)  # packed, they are no parameters
    path = model_dir("llama-uneven")
    whole = sum(p.numel() for p in load_model(path).parameters())

    def held(model: CausalLM) -> tuple[int, tuple[int, ...]]:
        return sum(p.numel() for p in model.parameters()), tuple(Ring(model, 2).pool.shape)

    ranks = in_ranks(path, 2, 2, held)
    sizes = [numel for numel, _ in ranks]
    norms = 64 * (3 * 2 + 1)  # the only ones that both ranks of a stage have
    assert sum(sizes) == whole + norms
    assert [shape[1:3] for _, shape in ranks] == [(1, 2), (1, 2), (1, 1), (1, 1)]


@pytest.mark.parametrize("name", ["llama-uneven", "qwen2", "qwen3-biased-window"])
def test_drawn_weights_do_not_depend_on_the_split(name: str, model_dir: ModelDir) -> None:
    path, ids = model_dir(name), prompt(20)

    def logits(model: CausalLM) -> Tensor:
        return Ring(model).step(chunks=[("a", ids)])["a"]

    expected = logits(load_model(path, load_format="dummy"))
    leader, *_ = in_ranks(path, 2, 2, logits, load_format="dummy")
    assert_same(leader, alike(expected, exact_logits(path, ids)))


def test_bfloat16_is_as_near_as_without_a_split(model_dir: ModelDir) -> None:
    """Though each rank's part of a sum is rounded before it is added."""
    path, ids = model_dir("llama"), prompt(100)
    exact = oracle_logits(path, ids)

    def logits(model: CausalLM) -> Tensor:
        return Ring(model).step(chunks=[("a", ids)])["a"]

    def error(found: Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    leader, _ = in_ranks(path, 2, 1, logits, dtype="bfloat16")
    assert error(leader) < 1.2 * error(logits(load_model(path, dtype="bfloat16")))


def test_a_tensor_of_another_shape_is_refused_by_every_rank(tmp_path: Path) -> None:
    path = save_llama(tmp_path / "model")
    config = path / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 320', '"vocab_size": 318'))
    with pytest.raises(ModelError, match=r"has shape \[320, 64\]; expected \[318, 64\]"):
        in_ranks(path, 2, 1, lambda model: None)
