"""The families with linear attention against transformers: prompts whole, in chunks and with states kept in
the middle, mixed steps, and splits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
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
from baton.process.options import ModelError
from baton_kernels.cpu.experts import PackedExperts
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.paged import PagedBatch, WantedRows
from tests.support.deep import all_deep_but
from tests.support.exact import alike, assert_same, exact_logits, joined
from tests.support.laid_out import LaidOut
from tests.support.model_ring import prompt
from tests.support.rank_threads import in_ranks
from tests.support.tiny_models import ModelDir, oracle_logits
from tests.support.tiny_states import STATES

ANSWER = 24
MAIN = ("qwen3-next", "kimi-linear", "ring-linear", "qwen3-5", "qwen3-5-moe")


class OfLastRows(LaidOut):
    """Yields the logits behind the last tokens of some sequences alone."""

    wanted: tuple[str, ...] = ()

    def _batch(
        self, names: list[str], work: Mapping[str, Sequence[int]], num_decode: int, cut: int
    ) -> PagedBatch:
        batch = super()._batch(names, work, num_decode, cut)
        ends = torch.tensor([len(work[name]) for name in names]).cumsum(0) - 1
        chosen = [names.index(name) for name in self.wanted]
        tables = [batch.chunks[index].table for index in chosen]
        none = torch.zeros((0, 0), dtype=torch.int64)
        return replace(batch, wanted=WantedRows(ends[chosen], torch.stack(tables) if tables else none))

    def last(self, work: Mapping[str, Sequence[int]], *wanted: str) -> Tensor:
        """Compute chunks of more than one token -> the logits of those wanted, in this order."""
        self.wanted = wanted
        tokens = torch.tensor([token for ids in work.values() for token in ids])
        with torch.inference_mode():
            hidden = self.model.forward(tokens, self._batch(list(work), work, 0, 0), self.pool)
            for name, ids in work.items():
                self._sequences[name].length += len(ids)
            return self.model.logits(hidden)


def whole(model: CausalLM, ids: list[int], block_size: int = 16) -> Tensor:
    return LaidOut(model, block_size).step({"a": ids})["a"]


@pytest.mark.parametrize("name", all_deep_but(5, STATES))
def test_logits_are_those_of_transformers(name: str, model_dir: ModelDir) -> None:
    """Whole prompts and chunks of 1, of an odd length and of many tokens, with states kept in between, beside
    others that decode."""
    path, a, b = model_dir(name), prompt(61, seed=1), prompt(75, seed=2)
    expected = {"a": exact_logits(path, a), "b": exact_logits(path, b)}
    model = load_model(path)
    assert_same(whole(model, a), expected["a"])
    laid = LaidOut(model, 8)
    parts: dict[str, list[Tensor]] = {"a": [], "b": []}
    steps = [(1, 7, 0), (1, 1, 0), (13, 33, 5), (2, 1, 1), (1, 20, 19), (1, 1, 0), (42, 12, 11)]
    at = {"a": 0, "b": 0}
    for of_a, of_b, cut in steps:
        work = {"a": a[at["a"] :][:of_a], "b": b[at["b"] :][:of_b]}
        for sequence, logits in laid.step(work, cut=cut).items():
            parts[sequence].append(logits)
            at[sequence] += len(work[sequence])
    assert at == {"a": len(a), "b": len(b)}
    for sequence, found in parts.items():
        assert_same(torch.cat(found), expected[sequence])


@pytest.mark.parametrize("name", MAIN)
def test_answers_are_those_of_transformers(name: str, model_dir: ModelDir) -> None:
    path, ids = model_dir(name), prompt(40, seed=3)
    laid, tokens = LaidOut(load_model(path), 16), [*ids]
    logits = laid.step({"a": ids})["a"]
    for _ in range(ANSWER):
        tokens.append(int(logits[-1].argmax()))
        logits = laid.step({"a": tokens[-1:]})["a"]
    choices = oracle_logits(path, tokens)[len(ids) - 1 : -1].topk(2)
    assert (choices.values[:, 0] - choices.values[:, 1]).min() > 1e-3, "too close a call; change the seed"
    assert tokens[len(ids) :] == choices.indices[:, 0].tolist()


@pytest.mark.parametrize("name", ["qwen3-next", "kimi-linear", "kimi-linear-odd", "ring-linear"])
def test_rows_that_are_wanted_alone(name: str, model_dir: ModelDir) -> None:
    """The last layer is linear attention in two models, latent attention in one, and attention in one."""
    path, a, b = model_dir(name), prompt(50, 1), prompt(33, 2)
    laid = OfLastRows(load_model(path), 16)
    assert not len(laid.last({"a": a[:20], "d": b[:11]}))
    got = laid.last({"a": a[20:], "d": b[11:]}, "d")
    assert_same(got[0], exact_logits(path, b)[-1])


@pytest.mark.parametrize("name", MAIN)
def test_bfloat16(name: str, model_dir: ModelDir, tmp_path: Path) -> None:
    """Half of the tokens' logits stay within 3 % of float32's, in norm, and nearer than transformers'."""
    path, ids = shutil.copytree(model_dir(name), tmp_path / name), prompt(70)
    for file in path.glob("*.safetensors"):
        rounded = {key: weight.bfloat16().float() for key, weight in load_file(file).items()}
        save_file(rounded, file, metadata={"format": "pt"})
    exact = oracle_logits(path, ids)

    def error(logits: Tensor) -> float:
        return float(((logits - exact).norm(dim=1) / exact.norm(dim=1)).median())

    ours = error(whole(load_model(path, dtype="bfloat16"), ids))
    assert ours < 3e-2
    assert ours < error(oracle_logits(path, ids, "bfloat16"))


@pytest.mark.parametrize("name", MAIN)
def test_rounded_weights(name: str, model_dir: ModelDir) -> None:
    """A quarter of the tokens' logits stay within 6 % of the plain weights', in norm."""
    path, ids = model_dir(name), prompt(70)
    exact = oracle_logits(path, ids)
    rounded = whole(load_model(path, quantization="int8"), ids)
    error = ((rounded - exact).norm(dim=1) / exact.norm(dim=1)).quantile(0.25)
    assert 1e-3 < error < 6e-2


@pytest.fixture
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for a rank that failed, and is a thread that the others cannot see the end of."""
    monkeypatch.setattr(collectives, "LONGEST", timedelta(seconds=20))


@pytest.mark.usefixtures("no_long_waits")
@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"),
    all_deep_but(
        3,
        [
            *((name, 2, 2) for name in MAIN),
            ("qwen3-next", 2, 1),
            ("qwen3-5", 1, 2),
            ("qwen3-next-odd", 4, 1),
            ("qwen3-next-odd", 1, 3),
            ("kimi-linear-odd", 4, 1),
            ("ring-linear-odd", 1, 2),
        ],
    ),
)
def test_splits(name: str, tp_size: int, pp_size: int, model_dir: ModelDir) -> None:
    path, a, b = model_dir(name), prompt(26, seed=1), prompt(30, seed=2)

    def logits(model: CausalLM) -> Tensor:
        laid = LaidOut(model, 16)
        first = laid.step({"a": a[:20], "b": b}, cut=7)
        second = laid.step({"a": a[20:21]}), laid.step({"a": a[21:]})
        return torch.cat((first["a"], *(step["a"] for step in second), first["b"]))

    leader, *_ = in_ranks(path, tp_size, pp_size, logits)
    assert_same(leader, joined([exact_logits(path, ids) for ids in (a, b)]))


@pytest.mark.parametrize(
    ("name", "heads"), [("qwen3-next", "2 key heads"), ("ring-linear", "4 key heads in 2 groups")]
)
def test_a_split_through_key_heads_or_groups_is_refused(name: str, heads: str, model_dir: ModelDir) -> None:
    config = ModelConfig.from_dir(model_dir(name))
    with pytest.raises(ValueError, match=rf"is 4; .*and linear attention of {heads}: 1, 2$"):
        Shard.of(config, 0, 4, 1)


@pytest.mark.usefixtures("no_long_waits")
@pytest.mark.parametrize("name", all_deep_but(2, MAIN))
def test_drawn_weights_do_not_depend_on_the_split(name: str, model_dir: ModelDir) -> None:
    path, ids = model_dir(name), prompt(20)
    expected = whole(load_model(path, load_format="dummy"), ids)
    assert expected.isfinite().all() and expected.std() > 0.1
    split = in_ranks(path, 2, 2, lambda model: whole(model, ids), load_format="dummy")
    assert_same(split[0], alike(expected, exact_logits(path, ids)))


def test_every_parameter_has_one_place_in_the_checkpoint(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for packed in (PackedWeight, PackedExperts):  # packed, they are no parameters
        monkeypatch.setattr(packed, "of", lambda *args, **options: None)
    for name in STATES:
        model = load_model(model_dir(name), load_format="dummy")
        for place in model.checkpoint_tensors().values():
            place.tensor.fill_(0)
        for place in model.checkpoint_tensors().values():
            place.tensor.add_(1)
        for parameter, values in model.named_parameters():
            assert (values == 1).all(), f"{name}: {parameter}"


def edited(path: Path, tensors: Mapping[str, Tensor], **config: object) -> Path:
    """The model with these tensors alone, and these fields of its config."""
    described = path / "config.json"
    save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
    described.write_text(json.dumps({**json.loads(described.read_text()), **config}))
    return path


def test_experts_in_one_tensor_as_qwen3_5_is_published(model_dir: ModelDir, tmp_path: Path) -> None:
    """Encoder, experts of a layer together, and a layer that drafts."""
    path = shutil.copytree(model_dir("qwen3-5-moe-with-encoder"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(3):
        stem = f"model.language_model.layers.{layer}.mlp.experts."
        assert f"{stem}0.gate_proj.weight" in tensors
        both = [
            torch.cat([tensors[f"{stem}{expert}.{half}_proj.weight"] for half in ("gate", "up")])
            for expert in range(7)
        ]
        fused[f"{stem}gate_up_proj"] = torch.stack(both)
        fused[f"{stem}down_proj"] = torch.stack([tensors[f"{stem}{e}.down_proj.weight"] for e in range(7)])
    ids = prompt(30)
    edited(path, {**fused, "mtp.layers.0.mlp.gate.weight": torch.ones(3)})
    assert_same(whole(load_model(path), ids), exact_logits(model_dir("qwen3-5-moe-with-encoder"), ids))
    edited(path, {**fused, "model.layers.7.mlp.gate.weight": torch.ones(3)})
    with pytest.raises(ModelError, match=r"has no place for tensor model\.layers\.7"):
        load_model(path)


def test_decays_in_the_type_of_the_checkpoint_are_read_as_float32(
    model_dir: ModelDir, tmp_path: Path
) -> None:
    path = shutil.copytree(model_dir("qwen3-5"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    edited(path, {name: t if "A_log" in name else t.bfloat16() for name, t in tensors.items()})
    places = load_model(path, dtype="bfloat16").checkpoint_tensors()
    name = "model.layers.0.linear_attn.A_log"
    assert torch.equal(places[name].tensor, tensors[name])
