"""The families without experts against transformers, as tests.unit.test_models has the first ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.models.base import CausalLM
from baton.models.loader import load_model
from baton_kernels.cpu.linear import PackedWeight
from tests.support.deep import all_deep_but
from tests.support.exact import alike, assert_same, exact_logits
from tests.support.model_ring import Ring, prompt
from tests.support.rank_threads import in_ranks
from tests.support.tiny_dense import DENSE
from tests.support.tiny_models import ModelDir, load_oracle, oracle_logits

MAIN = [name for name in DENSE if "-" not in name]
"""One model of each family; the others differ from it in a few fields."""
ODD_PROMPT = 61
"""Tokens: more than the windows, and in no whole number of blocks."""


@pytest.mark.parametrize("name", all_deep_but(16, DENSE))
def test_logits_are_those_of_transformers(name: str, model_dir: ModelDir) -> None:
    """A whole prompt, chunks, mixed steps, rows that are wanted alone, and greedy answers of a batch."""
    path, a, b = model_dir(name), prompt(ODD_PROMPT, seed=1), prompt(64, seed=2)
    expected = {"a": exact_logits(path, a), "b": exact_logits(path, b)}
    ring = Ring(load_model(path))
    assert_same(ring.step(chunks=[("whole", a)])["whole"], expected["a"])
    for sequence, logits in mixed_steps(ring, a, b).items():
        assert_same(logits, expected[sequence][: len(logits)])
    assert_same(ring.step_wanted([("c", b), ("d", a)], ["d"])[0], expected["a"][-1])
    prompts = {"e": prompt(5, seed=3), "f": prompt(14, seed=4)}
    for sequence, answer in ring.greedy(prompts, 48).items():
        check_likeliest(path, prompts[sequence], answer)


def mixed_steps(ring: Ring, a: list[int], b: list[int]) -> dict[str, Tensor]:
    """The logits of two sequences: uneven chunks, one decoding beside the other's chunk, both decoding."""
    steps = [
        ring.step(chunks=[("a", a[:50]), ("b", b[:30])]),
        ring.step([("a", a[50])], [("b", b[30:50])]),
        *(ring.step([("b", b[50 + i]), ("a", a[51 + i])]) for i in range(3)),
    ]
    return {name: torch.cat([step[name] for step in steps if name in step]) for name in "ab"}


def check_likeliest(path: Path, ids: list[int], answer: list[int]) -> None:
    """Each token of an answer is the likeliest after those before it, but for what float32 rounds."""
    logits = oracle_logits(path, [*ids, *answer[:-1]])[len(ids) - 1 :]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert (logits.max(1).values - chosen).max() < 1e-3
    assert len(set(answer)) > 2, "the model repeats itself, which proves little"


@pytest.mark.parametrize("name", MAIN)
def test_bfloat16(name: str, model_dir: ModelDir, tmp_path: Path) -> None:
    """Nearer to float32 than transformers, which rounds the residual stream too."""
    path, ids = shutil.copytree(model_dir(name), tmp_path / name), prompt(ODD_PROMPT)
    for file in path.glob("*.safetensors"):
        rounded = {key: weight.bfloat16().float() for key, weight in load_file(file).items()}
        save_file(rounded, file, metadata={"format": "pt"})
    exact = oracle_logits(path, ids)

    def error(logits: Tensor) -> float:
        return float((logits - exact).norm() / exact.norm())

    logits = Ring(load_model(path, dtype="bfloat16")).step(chunks=[("a", ids)])["a"]
    assert error(logits) < 2.5e-2
    assert error(logits) < error(oracle_logits(path, ids, "bfloat16"))


@pytest.mark.parametrize("name", all_deep_but(2, DENSE))
def test_split_over_ranks(name: str, model_dir: ModelDir) -> None:
    """In two stages of two ranks, and the models that differ in a few fields over two ranks."""
    path, a, b = model_dir(name), prompt(54, seed=1), prompt(53, seed=2)

    def work(model: CausalLM) -> dict[str, Tensor]:
        return mixed_steps(Ring(model), a, b)

    leader, *_ = in_ranks(path, 2, 2 if name in MAIN else 1, work)
    assert_same(leader["a"], exact_logits(path, a))
    assert_same(leader["b"], exact_logits(path, b))


def test_longrope_of_a_prompt_over_the_trained_length(model_dir: ModelDir) -> None:
    """All its tokens have the long factors, in chunks too."""
    path, ids = model_dir("phi3-longrope"), prompt(90)
    expected = exact_logits(path, ids)
    ring = Ring(load_model(path))
    ring.prompt_length = 90
    parts = [ring.step(chunks=[("a", ids[i : i + 37])])["a"] for i in range(0, 90, 37)]
    assert_same(torch.cat(parts), expected)


def test_longrope_past_the_trained_length(model_dir: ModelDir) -> None:
    """A prompt within the trained 64 positions, whose answer outgrows them: from there on, tokens have the
    long factors, as in transformers with a cache."""
    path, ids = model_dir("phi3-longrope"), prompt(75)
    ring, oracle = Ring(load_model(path)), load_oracle(path)
    ours = [ring.step(chunks=[("a", ids[:60])])["a"], *(ring.step([("a", t)])["a"] for t in ids[60:])]
    with torch.inference_mode():
        output = oracle(torch.tensor([ids[:60]]), use_cache=True)
        theirs = [output.logits[0]]
        for token in ids[60:]:
            output = oracle(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
            theirs.append(output.logits[0])
    assert_same(torch.cat(ours), alike(torch.cat(theirs), exact_logits(path, ids)))


def test_an_output_head_of_its_own_is_no_embedding(model_dir: ModelDir, tmp_path: Path) -> None:
    """Whatever the config says: transformers writes tie_word_embeddings beside an encoder unasked."""
    path = shutil.copytree(model_dir("mistral3-of-mistral"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    ids = prompt(20)
    logits = Ring(load_model(path)).step(chunks=[("a", ids)])["a"]
    assert_same(logits, exact_logits(path, ids))
    assert_same(logits, exact_logits(model_dir("mistral3-of-mistral"), ids))


def test_every_parameter_has_one_place_in_the_checkpoint(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedWeight, "of", lambda *args, **options: None)  # packed, they are no parameters
    for name in MAIN:
        model = load_model(model_dir(name), load_format="dummy")
        for place in model.checkpoint_tensors().values():
            place.tensor.fill_(0)
        for place in model.checkpoint_tensors().values():
            place.tensor.add_(1)
        for parameter, values in model.named_parameters():
            assert (values == 1).all(), f"{name}: {parameter}"


@pytest.mark.parametrize("name", ["gemma3-with-encoder", "phi3-longrope", "starcoder2", "olmo3"])
def test_drawn_weights_do_not_depend_on_the_split(name: str, model_dir: ModelDir) -> None:
    path, ids = model_dir(name), prompt(20)

    def logits(model: CausalLM) -> Tensor:
        return Ring(model).step(chunks=[("a", ids)])["a"]

    expected = logits(load_model(path, load_format="dummy"))
    assert expected.isfinite().all()
    leader, *_ = in_ranks(path, 2, 1, logits, load_format="dummy")
    assert_same(leader, alike(expected, exact_logits(path, ids)))
