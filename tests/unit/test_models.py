"""Every family against transformers: whole prompts, chunks, decoding in mixed batches."""

from __future__ import annotations

import shutil
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from baton.models.config import ModelConfig, RopeConfig
from baton.models.loader import kv_block_bytes, load_model, new_kv_pool
from baton.models.registry import FAMILIES
from baton.models.rope import LONGEST_TABLE, RotaryEmbedding, inverse_frequencies, rope_tables
from baton_kernels.cpu.linear import PackedWeight
from tests.support.deep import all_deep_but
from tests.support.exact import alike, assert_same, exact_logits
from tests.support.model_ring import Ring, prompt
from tests.support.tiny_models import TINY_MODELS, ModelDir, load_oracle, oracle_greedy, oracle_logits


@pytest.mark.parametrize("name", all_deep_but(8, TINY_MODELS))
def test_whole_prompt(name: str, model_dir: ModelDir) -> None:
    path, ids = model_dir(name), prompt(120)
    logits = Ring(load_model(path)).step(chunks=[("a", ids)])["a"]
    assert_same(logits, exact_logits(path, ids))


@pytest.mark.parametrize("name", all_deep_but(8, TINY_MODELS))
def test_chunks_and_decoding_in_mixed_steps(name: str, model_dir: ModelDir) -> None:
    """Two prompts in uneven chunks, one decoding while the other still prefills, then both decoding."""
    path = model_dir(name)
    a, b = prompt(75, seed=1), prompt(103, seed=2)
    ring = Ring(load_model(path))
    steps = [
        ring.step(chunks=[("a", a[:7]), ("b", b[:40])]),
        ring.step(chunks=[("b", b[40:41]), ("a", a[7:50])]),
        *(ring.step([("a", a[50 + i])], [("b", b[41 + 15 * i : 56 + 15 * i])]) for i in range(3)),
        ring.step(chunks=[("b", b[86:89])]),
        *(ring.step([("b", b[89 + i]), ("a", a[53 + i])]) for i in range(14)),
    ]
    for sequence, ids, seen in (("a", a, 67), ("b", b, 103)):
        logits = torch.cat([step[sequence] for step in steps if sequence in step])
        assert_same(logits, exact_logits(path, ids[:seen]))


@pytest.mark.parametrize("name", all_deep_but(4, TINY_MODELS))
def test_rows_that_are_wanted_alone(name: str, model_dir: ModelDir) -> None:
    path = model_dir(name)
    model = load_model(path)
    whole, narrow = Ring(model), Ring(model)
    first = {"a": prompt(50, 1), "b": prompt(33, 2), "c": prompt(7, 3)}
    second = {"a": prompt(20, 4), "b": prompt(1, 5), "c": prompt(40, 6)}
    whole.step(chunks=list(first.items()))
    narrow.step_wanted(list(first.items()), [])
    torch.testing.assert_close(narrow.pool, whole.pool, rtol=0, atol=1e-5)
    expected = whole.step(chunks=list(second.items()))
    got = narrow.step_wanted(list(second.items()), ["a", "c"])
    torch.testing.assert_close(narrow.pool, whole.pool, rtol=0, atol=1e-5)
    for sequence, logits in zip(["a", "c"], got, strict=True):
        exact = exact_logits(path, first[sequence] + second[sequence])
        assert_same(logits, alike(expected[sequence][-1], exact))


@pytest.mark.parametrize("name", all_deep_but(8, TINY_MODELS))
def test_greedy_answers_of_a_batch(name: str, model_dir: ModelDir) -> None:
    path = model_dir(name)
    prompts = {"a": prompt(5, seed=3), "b": prompt(64, seed=4), "c": prompt(30, seed=5)}
    answers = Ring(load_model(path)).greedy(prompts, 30)
    for sequence, ids in prompts.items():
        expected, margin = oracle_greedy(path, ids, 30)
        assert margin > 1e-3, "too close a call to compare; change the seed"
        assert answers[sequence] == expected


@pytest.mark.parametrize("name", all_deep_but(4, TINY_MODELS))
def test_bfloat16(name: str, model_dir: ModelDir, tmp_path: Path) -> None:
    """Weights saved in bfloat16, as checkpoints are: the logits stay within 2 % of float32's, in norm, and
    nearer than those of transformers, which rounds the residual stream and the rotary tables too."""
    path, ids = shutil.copytree(model_dir(name), tmp_path / name), prompt(100)
    for file in path.glob("*.safetensors"):
        rounded = {key: weight.bfloat16().float() for key, weight in load_file(file).items()}
        save_file(rounded, file, metadata={"format": "pt"})
    exact = oracle_logits(path, ids)

    def error(logits: Tensor) -> float:
        return float((logits - exact).norm() / exact.norm())

    logits = Ring(load_model(path, dtype="bfloat16")).step(chunks=[("a", ids)])["a"]
    assert logits.dtype == torch.float32
    assert error(logits) < 2e-2
    assert error(logits) < error(oracle_logits(path, ids, "bfloat16"))


def test_dynamic_rope_past_the_trained_length(model_dir: ModelDir) -> None:
    """A prompt within the trained 256 positions whose answer outgrows them, as transformers decodes it."""
    path, ids = model_dir("llama-dynamic"), prompt(290)
    ring = Ring(load_model(path))
    ours = [ring.step(chunks=[("a", ids[:250])])["a"], *(ring.step([("a", t)])["a"] for t in ids[250:])]
    load_oracle.cache_clear()  # its angles depend on what it has seen before
    oracle = load_oracle(path)
    with torch.inference_mode():
        output = oracle(torch.tensor([ids[:250]]), use_cache=True)
        theirs = [output.logits[0]]
        for token in ids[250:]:
            output = oracle(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
            theirs.append(output.logits[0])
    assert_same(torch.cat(ours), alike(torch.cat(theirs), exact_logits(path, ids)))


def test_dynamic_rope_of_a_prompt_over_the_trained_length(model_dir: ModelDir) -> None:
    """All its tokens get the base of the whole prompt, as in a freshly loaded transformers; in chunks too."""
    path, ids = model_dir("llama-dynamic"), prompt(400)
    ring = Ring(load_model(path))
    load_oracle.cache_clear()
    expected = exact_logits(path, ids)
    ring.prompt_length = 400
    assert_same(ring.step(chunks=[("a", ids)])["a"], expected)
    parts = [ring.step(chunks=[("b", ids[i : i + 77])])["b"] for i in range(0, 400, 77)]
    assert_same(torch.cat(parts), expected)


def test_dynamic_rope_does_not_depend_on_the_chunks(model_dir: ModelDir) -> None:
    path, ids = model_dir("llama-dynamic"), prompt(400)
    ring = Ring(load_model(path))
    whole = ring.step(chunks=[("a", ids)])["a"]
    parts = [ring.step(chunks=[("b", ids[i : i + 77])])["b"] for i in range(0, 400, 77)]
    assert_same(torch.cat(parts), alike(whole, exact_logits(path, ids)))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 500_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.5},
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "attention_factor": 1.25,
        },
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn-attention-factor"],
)
def test_frequencies_at_real_sizes(parameters: dict[str, object]) -> None:
    theirs = LlamaConfig(
        hidden_size=1024, num_attention_heads=8, max_position_embeddings=131072, rope_parameters=parameters
    )
    oracle = LlamaRotaryEmbedding(theirs)
    config = ModelConfig.from_dict({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]})
    frequencies, scale = inverse_frequencies(config.rope, config.head_dim)
    torch.testing.assert_close(frequencies, oracle.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(oracle.attention_scaling, rel=1e-9)
    cos, sin = rope_tables(config.rope, config.head_dim, 5000)
    expected_cos, expected_sin = oracle(torch.zeros(1), torch.arange(5000)[None])
    torch.testing.assert_close(cos, expected_cos[0], rtol=0, atol=2e-3)
    torch.testing.assert_close(sin[:, 64:], expected_sin[0, :, 64:], rtol=0, atol=2e-3)
    assert torch.equal(sin[:, :64], -sin[:, 64:])


@pytest.mark.parametrize(
    "rope", [None, RopeConfig(), RopeConfig("yarn", factor=4.0, original_max_positions=64, partial=0.5)]
)
def test_angles_without_a_table_are_those_of_a_table(rope: RopeConfig | None) -> None:
    positions = torch.tensor([0, 5, 190])
    ours = RotaryEmbedding(rope, 16, LONGEST_TABLE + 1)
    assert not any(buffer.numel() > 16 for buffer in ours.buffers())
    for found, expected in zip(ours(positions), RotaryEmbedding(rope, 16, 191)(positions), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_every_parameter_has_one_place_in_the_checkpoint(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedWeight, "of", lambda *args, **options: None)  # packed, they are no parameters
    for name in ("llama-biased-mqa", "qwen2", "qwen3-biased-window"):
        model = load_model(model_dir(name), load_format="dummy")
        for place in model.checkpoint_tensors().values():
            place.tensor.fill_(0)
        for place in model.checkpoint_tensors().values():
            place.tensor.add_(1)
        for parameter, values in model.named_parameters():
            assert (values == 1).all(), f"{name}: {parameter}"


def test_dummy_weights_come_from_the_seed(model_dir: ModelDir) -> None:
    path, ids = model_dir("qwen3"), prompt(20)
    first, same, other = (
        Ring(load_model(path, load_format="dummy", seed=seed)).step(chunks=[("a", ids)])["a"]
        for seed in (7, 7, 8)
    )
    assert torch.equal(first, same)
    assert not torch.allclose(first, other, atol=0.1)
    assert first.isfinite().all()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_has_its_reader(architecture: str) -> None:
    assert callable(resolve_name(FAMILIES[architecture].read))


def test_pool_shape_and_size(model_dir: ModelDir) -> None:
    config = ModelConfig.from_dir(model_dir("llama"))
    pool = new_kv_pool(config, 5, 32, torch.bfloat16, "cpu")
    assert pool.shape == (5, 2, 3, 2, 32, 16)
    assert pool.nbytes == 5 * kv_block_bytes(config, 32, torch.bfloat16)
    assert not pool.any()
