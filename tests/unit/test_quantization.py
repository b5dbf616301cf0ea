"""Whole models with int8 weights, against transformers with the weights that the int8 stand for."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.rank_start import part_of
from baton.models.base import CausalLM
from baton.models.layers import Linear
from baton.models.loader import load_model
from baton.models.quantization.registry import Quantization
from baton.parallel.layout import Layout
from baton.process.options import ConfigError, ModelError
from baton.speculation import choice
from baton.worker.config import WorkerConfig
from baton_kernels.cpu import library, linear
from baton_kernels.int8 import quantize
from tests.support.exact import alike, assert_same, exact_logits
from tests.support.model_ring import Ring, prompt
from tests.support.rank_threads import in_ranks
from tests.support.tiny_models import (
    ModelDir,
    load_oracle,
    oracle_greedy,
    oracle_logits,
    save_llama,
)

NAMES = ("llama", "llama-tied-mha", "llama-biased-mqa", "mistral", "qwen2", "qwen3-biased-window")


def rounded(weight: Tensor) -> Tensor:
    """What the weight is once it is int8."""
    return quantize(weight).dequantized()


def dequantized(path: Path) -> Path:
    """The same model with the weights that int8 stand for, in a directory of its own, loaded as the oracle.
    A tied head is one of its own there: the embedding is not rounded."""
    other = path.with_name(f"{path.name}-int8")
    if not other.exists():
        shutil.copytree(path, other)
        weights = load_file(path / "model.safetensors")
        for name, weight in weights.items():
            if weight.dim() == 2 and "embed_tokens" not in name:
                weights[name] = rounded(weight)
        save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    oracle = load_oracle(other, "float32")  # as the functions below ask for it
    if oracle.config.tie_word_embeddings:
        embedding = oracle.get_input_embeddings().weight
        if oracle.lm_head.weight is embedding:
            oracle.lm_head.weight = nn.Parameter(rounded(embedding.detach()), requires_grad=False)
    return other


@pytest.mark.parametrize("name", NAMES)
def test_whole_prompt(name: str, model_dir: ModelDir) -> None:
    path, ids = model_dir(name), prompt(120)
    logits = Ring(load_model(path, quantization="int8")).step(chunks=[("a", ids)])["a"]
    assert_same(logits, exact_logits(dequantized(path), ids))
    assert not torch.allclose(logits, oracle_logits(path, ids), atol=1e-2), "nothing was rounded"


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_of_a_batch(name: str, model_dir: ModelDir) -> None:
    path = model_dir(name)
    prompts = {"a": prompt(5, seed=3), "b": prompt(64, seed=4), "c": prompt(30, seed=5)}
    answers = Ring(load_model(path, quantization="int8")).greedy(prompts, 20)
    for sequence, ids in prompts.items():
        expected, margin = oracle_greedy(dequantized(path), ids, 20)
        assert margin > 1e-3, "too close a call to compare; change the seed"
        assert answers[sequence] == expected


def test_bfloat16(model_dir: ModelDir) -> None:
    """int8 as they are, activations rounded: as near to the oracle as bfloat16 is with its own weights."""
    path, ids = model_dir("llama"), prompt(100)

    def error(quantization: Quantization, exact: Tensor) -> float:
        logits = Ring(load_model(path, "bfloat16", quantization=quantization)).step(chunks=[("a", ids)])["a"]
        return float((logits - exact).norm() / exact.norm())

    assert error("int8", oracle_logits(dequantized(path), ids)) < 1.2 * error(
        "none", oracle_logits(path, ids)
    )


@pytest.mark.parametrize("name", ["llama", "llama-tied-mha", "qwen3-biased-window"])
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (2, 2)])
def test_a_split_rounds_as_one_rank_does(name: str, tp_size: int, pp_size: int, model_dir: ModelDir) -> None:
    """A rank that has some columns of a weight has the scales of its whole rows."""
    path, ids = model_dir(name), prompt(60)

    def logits(model: CausalLM) -> Tensor:
        return Ring(model).step(chunks=[("a", ids)])["a"]

    leader, *_ = in_ranks(path, tp_size, pp_size, logits, quantization="int8")
    assert_same(leader, exact_logits(dequantized(path), ids))


def test_drawn_weights_do_not_depend_on_the_split(model_dir: ModelDir) -> None:
    path, ids = model_dir("llama"), prompt(20)

    def logits(model: CausalLM) -> Tensor:
        return Ring(model).step(chunks=[("a", ids)])["a"]

    drawn = logits(load_model(path, load_format="dummy", quantization="int8"))
    split = in_ranks(path, 2, 1, logits, load_format="dummy", quantization="int8")[0]
    assert_same(split, alike(drawn, exact_logits(path, ids)))
    assert not torch.equal(drawn, logits(load_model(path, load_format="dummy")))


def test_matmuls_take_half_of_the_memory(model_dir: ModelDir) -> None:
    path = model_dir("llama")

    def held(quantization: Quantization) -> int:
        model = load_model(path, "bfloat16", quantization=quantization)
        layers = [module for module in model.modules() if isinstance(module, Linear)]
        assert all(layer.weights is None and not list(layer.parameters()) for layer in layers), (
            "a plain one is kept"
        )
        return sum(layer.packed.nbytes for layer in layers if layer.packed is not None)

    rows = 3 * ((4 + 2 + 2) * 16 + 64 + 2 * 112 + 64) + 320
    padded = 3 * (128 + 64 + 2 * 128 + 64) + 320  # panels of 64, gated ones of 2 x 32
    assert rows < padded
    inputs = 3 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 112) + 320 * 64
    assert held("none") == 2 * inputs
    assert held("int8") == inputs + 4 * padded


def test_a_draft_model_follows(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    path, loaded = model_dir("llama"), list[CausalLM]()

    def noted(*args: object, **options: object) -> CausalLM:
        loaded.append(load_model(*args, **options))  # type: ignore[arg-type]
        return loaded[-1]

    monkeypatch.setattr(choice, "load_model", noted)
    config = EngineConfig(
        path, num_blocks=16, quantization="int8", speculative_method="draft", speculative_model=str(path)
    )
    Engine.from_config(config)
    assert [model.scheme.name for model in loaded] == ["int8"]


class TestRefusals:
    def refusal(self, path: Path, **options: str) -> str:
        with pytest.raises(ModelError) as error:
            load_model(path, quantization="int8", **options)  # type: ignore[arg-type]
        return str(error.value)

    def test_another_type(self, model_dir: ModelDir) -> None:
        path = model_dir("llama")
        said = "quantization (--quantization) is int8; allowed"
        assert self.refusal(path, dtype="float16") == f"{said} with dtype float16: none"

    def test_without_kernels(self, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(library.SWITCH, "plain")
        monkeypatch.setattr(linear, "native", library.native.__wrapped__)
        assert "allowed without the CPU's kernels" in self.refusal(model_dir("llama"))

    def test_a_size_without_a_kernel(self, tmp_path: Path) -> None:
        path = save_llama(tmp_path / "odd", intermediate_size=113)
        assert "a projection of 113 inputs" in self.refusal(path)

    def test_options(self, model_dir: ModelDir) -> None:
        with pytest.raises(ValueError, match="quantization is 'int4'; allowed: auto, none, int8, fp8"):
            EngineConfig(model_dir("llama"), quantization="int4")  # type: ignore[arg-type]
        with pytest.raises(
            ConfigError, match="--quantization: must be one of auto, none, int8, fp8, not 'int4'"
        ):
            WorkerConfig(role="both", quantization="int4")  # type: ignore[arg-type]


def test_every_rank_is_told(model_dir: ModelDir) -> None:
    config = EngineConfig(model_dir("llama"), tensor_parallel_size=2)
    assert part_of(replace(config, quantization="int8"), 1, Layout(1, 2)).quantization == "int8"
