"""The families with Mamba-2 layers or short convolutions against transformers: prompts whole and in chunks,
mixed steps, and splits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.loader import load_model
from baton.parallel import collectives
from baton.parallel.shard import Shard
from baton_kernels.cpu.experts import PackedExperts
from baton_kernels.cpu.linear import PackedWeight
from tests.support.deep import all_deep_but
from tests.support.exact import alike, assert_same, exact_logits, joined
from tests.support.laid_out import LaidOut
from tests.support.model_ring import prompt
from tests.support.rank_threads import in_ranks
from tests.support.tiny_mambas import MAMBAS
from tests.support.tiny_models import ModelDir, oracle_logits

BLOCK_SIZE = 16
ONE_OF_EACH = (
    "nemotron-h",
    "nemotron-h-latent",
    "granite-hybrid",
    "falcon-h1",
    "bamba-biased",
    "lfm2",
    "lfm2-moe",
)


@pytest.mark.parametrize("name", all_deep_but(8, MAMBAS))
def test_logits_are_those_of_transformers(name: str, model_dir: ModelDir) -> None:
    """One prompt whole, one in odd chunks whose states are kept in the middle, one token by token, each
    beside others that decode."""
    path = model_dir(name)
    prompts = {"whole": prompt(90, 1), "odd": prompt(77, 2), "single": prompt(30, 3)}
    laid, parts = LaidOut(load_model(path), BLOCK_SIZE), dict[str, list[Tensor]]({n: [] for n in prompts})
    at = dict.fromkeys(prompts, 0)
    sizes = {"whole": [70] + [1] * 20, "odd": [5, 33, 1, 1, 2, 23, 1, 11], "single": [1] * 30}
    for turn in range(30):
        work = {}
        for sequence, ids in prompts.items():
            count = sizes[sequence][turn] if turn < len(sizes[sequence]) else 0
            if count:
                work[sequence] = ids[at[sequence] : at[sequence] + count]
                at[sequence] += count
        for sequence, logits in laid.step(work, cut=4).items():
            parts[sequence].append(logits)
    for sequence, ids in prompts.items():
        assert_same(torch.cat(parts[sequence]), exact_logits(path, ids))


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "nemotron-h-biased", "lfm2-biased"])
def test_rows_that_are_wanted_alone(name: str, model_dir: ModelDir) -> None:
    path = model_dir(name)
    laid, prompts = LaidOut(load_model(path), BLOCK_SIZE), {"a": prompt(40, 1), "b": prompt(25, 2)}
    laid.step_wanted({"a": prompts["a"][:30], "b": prompts["b"][:11]}, [])
    [got] = laid.step_wanted({"a": prompts["a"][30:39], "b": prompts["b"][11:]}, ["b"])
    assert_same(got, exact_logits(path, prompts["b"])[-1])
    [got] = laid.step({"a": prompts["a"][39:]})["a"]
    assert_same(got, exact_logits(path, prompts["a"])[-1])


def test_time_steps_have_limits(tmp_path: Path) -> None:
    """Those of prompts and of answers alike. transformers has limits in prompts alone, so it is asked for
    whole ones."""
    ids, limits = prompt(40), {"time_step_limit": (0.2, 1.5)}
    recipe = MAMBAS["granite-hybrid"]
    path = replace(recipe, overrides={**recipe.overrides, **limits})(tmp_path / "limited")
    laid = LaidOut(load_model(path), BLOCK_SIZE)
    parts = [laid.step({"a": part})["a"] for part in (ids[:30], *([token] for token in ids[30:]))]
    assert_same(torch.cat(parts), exact_logits(path, ids))
    free = recipe(tmp_path / "free")
    assert (oracle_logits(free, ids) - oracle_logits(path, ids)).abs().max() > 0.01


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_bfloat16(name: str, model_dir: ModelDir, tmp_path: Path) -> None:
    """Half of the tokens' logits stay within 5 % of float32's, in norm, and nearer than transformers'."""
    path, ids = shutil.copytree(model_dir(name), tmp_path / name), prompt(70)
    for file in path.glob("*.safetensors"):
        rounded = {key: weight.bfloat16().float() for key, weight in load_file(file).items()}
        save_file(rounded, file, metadata={"format": "pt"})
    exact = oracle_logits(path, ids)

    def error(logits: Tensor) -> float:
        return float(((logits - exact).norm(dim=1) / exact.norm(dim=1)).median())

    ours = error(LaidOut(load_model(path, dtype="bfloat16"), BLOCK_SIZE).step({"a": ids})["a"])
    assert ours < 5e-2
    assert ours < error(oracle_logits(path, ids, "bfloat16"))


@pytest.mark.parametrize("name", ["nemotron-h-latent", "falcon-h1", "lfm2"])
def test_rounded_weights(name: str, model_dir: ModelDir) -> None:
    """A quarter of the tokens' logits stay within 10 % of the plain weights', in norm."""
    path, ids = model_dir(name), prompt(70)
    exact = oracle_logits(path, ids)
    rounded = LaidOut(load_model(path, quantization="int8"), BLOCK_SIZE).step({"a": ids})["a"]
    error = ((rounded - exact).norm(dim=1) / exact.norm(dim=1)).quantile(0.25)
    assert 1e-3 < error < 1e-1


@pytest.fixture
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for a rank that failed, and is a thread that the others cannot see the end of."""
    monkeypatch.setattr(collectives, "LONGEST", timedelta(seconds=20))


@pytest.mark.usefixtures("no_long_waits")
@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"),
    all_deep_but(
        4,
        [
            *((name, 2, 2) for name in ONE_OF_EACH),
            *((name, 2, 1) for name in ("nemotron-h-experts", "granite-hybrid-dense", "falcon-h1-normed")),
            *(
                (name, 1, 2)
                for name in ("nemotron-h-biased", "falcon-h1-gated-first", "bamba", "lfm2-biased")
            ),
            ("nemotron-h", 4, 1),
            ("bamba", 4, 1),
            ("lfm2-moe-unbiased", 4, 1),
        ],
    ),
)
def test_splits(name: str, tp_size: int, pp_size: int, model_dir: ModelDir) -> None:
    path, prompts = model_dir(name), {"a": prompt(26, seed=1), "b": prompt(30, seed=2)}

    def logits(model: CausalLM) -> Tensor:
        laid = LaidOut(model, BLOCK_SIZE)
        first = laid.step({"a": prompts["a"][:25], "b": prompts["b"]}, cut=7)
        return torch.cat((first["a"], laid.step({"a": prompts["a"][25:]})["a"], first["b"]))

    leader, *_ = in_ranks(path, tp_size, pp_size, logits)
    assert_same(leader, joined([exact_logits(path, ids) for ids in prompts.values()]))


@pytest.mark.usefixtures("no_long_waits")
@pytest.mark.parametrize("name", ["nemotron-h-latent", "falcon-h1", "lfm2-moe"])
def test_drawn_weights_do_not_depend_on_the_split(name: str, model_dir: ModelDir) -> None:
    path, ids = model_dir(name), prompt(20)

    def logits(model: CausalLM) -> Tensor:
        return LaidOut(model, BLOCK_SIZE).step({"a": ids})["a"]

    expected = logits(load_model(path, load_format="dummy"))
    assert expected.isfinite().all()
    leader, *_ = in_ranks(path, 2, 2, logits, load_format="dummy")
    assert_same(leader, alike(expected, exact_logits(path, ids)))


def test_every_parameter_has_one_place_in_the_checkpoint(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for packed in (PackedWeight, PackedExperts):  # packed, they are no parameters
        monkeypatch.setattr(packed, "of", lambda *args, **options: None)
    for name in ("nemotron-h-latent", "granite-hybrid-dense", "falcon-h1-normed", "lfm2-biased", "lfm2-moe"):
        model = load_model(model_dir(name), load_format="dummy")
        for place in model.checkpoint_tensors().values():
            place.tensor.fill_(0)
        for place in model.checkpoint_tensors().values():
            place.tensor.add_(1)
        for parameter, values in model.named_parameters():
            assert (values == 1).all(), f"{name}: {parameter}"


@pytest.mark.parametrize(
    ("name", "tp_size", "message"),
    [
        ("nemotron-h", 8, "tensor_parallel_size is 8; allowed for a model of 4 attention heads"),
        ("falcon-h1", 3, "Mamba layers of 4 units of heads in 1 groups: 1, 2, 4"),
        ("lfm2", 3, "convolutions of 8 units of channels: 1, 2, 4"),
    ],
)
def test_splits_that_units_do_not_allow(name: str, tp_size: int, message: str, model_dir: ModelDir) -> None:
    config = replace(ModelConfig.from_dir(model_dir(name)), num_heads=4, num_kv_heads=4)
    with pytest.raises(ValueError, match=message):
        Shard.of(config, 0, tp_size, 1)


def test_units_alone_refuse_a_split(model_dir: ModelDir) -> None:
    config = ModelConfig.from_dir(model_dir("nemotron-h"))
    assert config.mamba is not None
    uneven = replace(config, num_heads=12, num_kv_heads=12, mamba=replace(config.mamba, groups=2, units=4))
    with pytest.raises(ValueError, match=r"Mamba layers of 4 units of heads in 2 groups: 1, 2, 4$"):
        Shard.of(uneven, 0, 3, 1)
