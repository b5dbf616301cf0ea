"""The families with experts against transformers: prompts whole and in chunks, mixed steps, and splits."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.loader import load_model
from baton.models.rope import RotaryEmbedding
from baton.parallel import collectives
from baton.process.options import ModelError
from baton_kernels.cpu.experts import PackedExperts
from baton_kernels.cpu.linear import PackedWeight
from tests.support.deep import all_deep_but
from tests.support.exact import alike, assert_same, exact_logits, joined
from tests.support.model_ring import Ring, prompt
from tests.support.rank_threads import in_ranks
from tests.support.tiny_mixtures import MIXTURES
from tests.support.tiny_models import ModelDir, oracle_logits

ANSWER = 48
ONE_OF_EACH = (
    "mixtral",
    "qwen2-moe-dense-layers",
    "qwen3-moe",
    "glm4-moe",
    "minimax-m2",
    "hy-v3-biased",
    "hunyuan-moe",
    "gpt-oss",
    "llama4",
    "phimoe",
    "granite-moe-shared",
    "olmoe",
    "ernie45-moe-biased",
)


def answered(ring: Ring, prompts: dict[str, list[int]]) -> dict[str, tuple[list[int], Tensor]]:
    """Greedy answers to two prompts, a whole one and one in chunks: the tokens of prompt and answer, and the
    logits of all but the last. Both decode while others prefill, or decode, too."""
    (a, first), (b, second) = prompts.items()
    tokens = {a: [*first], b: [*second]}
    parts: dict[str, list[Tensor]] = {a: [], b: []}

    def step(decode: list[str], chunks: list[tuple[str, list[int]]]) -> None:
        for name, logits in ring.step([(name, tokens[name][-1]) for name in decode], chunks).items():
            parts[name].append(logits)
            if sum(map(len, parts[name])) == len(tokens[name]):
                tokens[name].append(int(logits[-1].argmax()))

    step([], [(a, first), (b, second[:9])])
    step([a], [(b, second[9:11])])
    step([a], [(b, second[11:])])
    while len(tokens[b]) < len(second) + ANSWER:
        step([b] if len(tokens[a]) == len(first) + ANSWER else [b, a], [])
    return {name: (tokens[name], torch.cat(parts[name])) for name in tokens}


@pytest.mark.parametrize("name", all_deep_but(8, MIXTURES))
def test_answers_are_those_of_transformers(name: str, model_dir: ModelDir) -> None:
    path, prompts = model_dir(name), {"a": prompt(41, seed=3), "b": prompt(30, seed=4)}
    for sequence, (ids, logits) in answered(Ring(load_model(path)), prompts).items():
        expected = exact_logits(path, ids[:-1])
        assert_same(logits, expected)
        choices = expected.logits[-ANSWER:].topk(2)
        assert (choices.values[:, 0] - choices.values[:, 1]).min() > 1e-3, "too close a call; change the seed"
        assert ids[len(prompts[sequence]) :] == choices.indices[:, 0].tolist()


@pytest.mark.parametrize("name", ["gpt-oss", "llama4", "granite-moe-shared", "minimax-m2", "glm4-moe"])
def test_rows_that_are_wanted_alone(name: str, model_dir: ModelDir) -> None:
    path = model_dir(name)
    model = load_model(path)
    whole, narrow = Ring(model), Ring(model)
    first = {"a": prompt(50, 1), "b": prompt(33, 2)}
    second = {"a": prompt(20, 4), "b": prompt(1, 5)}
    whole.step(chunks=list(first.items()))
    narrow.step_wanted(list(first.items()), [])
    expected = whole.step(chunks=list(second.items()))
    (got,) = narrow.step_wanted(list(second.items()), ["b"])
    torch.testing.assert_close(narrow.pool, whole.pool, rtol=0, atol=1e-5)
    exact = exact_logits(path, first["b"] + second["b"])
    assert_same(got, alike(expected["b"][-1], exact))


@pytest.mark.parametrize("name", all_deep_but(3, ONE_OF_EACH))
def test_bfloat16(name: str, model_dir: ModelDir, tmp_path: Path) -> None:
    """Half of the tokens' logits stay within 3 % of float32's, in norm, and nearer than transformers'. The
    others may be those of other experts: a choice that is nearly even turns with the last bit."""
    path, ids = shutil.copytree(model_dir(name), tmp_path / name), prompt(70)
    for file in path.glob("*.safetensors"):
        rounded = {key: weight.bfloat16().float() for key, weight in load_file(file).items()}
        save_file(rounded, file, metadata={"format": "pt"})
    exact = oracle_logits(path, ids)

    def error(logits: Tensor) -> float:
        return float(((logits - exact).norm(dim=1) / exact.norm(dim=1)).median())

    ours = error(Ring(load_model(path, dtype="bfloat16")).step(chunks=[("a", ids)])["a"])
    assert ours < 3e-2
    assert ours < error(oracle_logits(path, ids, "bfloat16"))


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "llama4", "granite-moe-shared"])
def test_rounded_weights(name: str, model_dir: ModelDir) -> None:
    """A quarter of the tokens' logits stay within 5 % of the plain weights', in norm; of the others, many are
    of other experts."""
    path, ids = model_dir(name), prompt(70)
    exact = oracle_logits(path, ids)
    rounded = Ring(load_model(path, quantization="int8")).step(chunks=[("a", ids)])["a"]
    error = ((rounded - exact).norm(dim=1) / exact.norm(dim=1)).quantile(0.25)
    assert 1e-3 < error < 5e-2


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
            *((name, 2, 2) for name in (*ONE_OF_EACH, "granite-moe")),
            *((name, 2, 1) for name in ("glm4-moe", "gpt-oss")),
            *((name, 1, 2) for name in ("qwen2-moe-dense-layers", "hunyuan-moe-alpha")),
            ("hy-v3-biased", 4, 1),
            ("minimax-m2-mqa", 4, 1),
        ],
    ),
)
def test_splits(name: str, tp_size: int, pp_size: int, model_dir: ModelDir) -> None:
    path, prompts = model_dir(name), {"a": prompt(26, seed=1), "b": prompt(30, seed=2)}

    def logits(model: CausalLM) -> Tensor:
        return torch.cat(list(Ring(model).step(chunks=list(prompts.items())).values()))

    leader, *_ = in_ranks(path, tp_size, pp_size, logits)
    assert_same(leader, joined([exact_logits(path, ids) for ids in prompts.values()]))


@pytest.mark.usefixtures("no_long_waits")
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "granite-moe-shared"])
def test_drawn_weights_do_not_depend_on_the_split(name: str, model_dir: ModelDir) -> None:
    path, ids = model_dir(name), prompt(20)

    def logits(model: CausalLM) -> Tensor:
        return Ring(model).step(chunks=[("a", ids)])["a"]

    expected = logits(load_model(path, load_format="dummy"))
    assert expected.isfinite().all()
    leader, *_ = in_ranks(path, 2, 2, logits, load_format="dummy")
    assert_same(leader, alike(expected, exact_logits(path, ids)))


def test_every_parameter_has_one_place_in_the_checkpoint(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for packed in (PackedWeight, PackedExperts):  # packed, they are no parameters
        monkeypatch.setattr(packed, "of", lambda *args, **options: None)
    for name in ("qwen2-moe", "gpt-oss", "llama4", "granite-moe-shared", "ernie45-moe"):
        model = load_model(model_dir(name), load_format="dummy")
        for place in model.checkpoint_tensors().values():
            place.tensor.fill_(0)
        for place in model.checkpoint_tensors().values():
            place.tensor.add_(1)
        for parameter, values in model.named_parameters():
            assert (values == 1).all(), f"{name}: {parameter}"


def edited(path: Path, changes: dict[str, Tensor | None], **config: object) -> Path:
    """The model, with these tensors changed, added or (None) taken away, and these fields of its config."""
    file, described = path / "model.safetensors", path / "config.json"
    tensors = load_file(file)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    described.write_text(json.dumps({**json.loads(described.read_text()), **config}))
    return path


@pytest.mark.parametrize(
    ("name", "tensor", "config"),
    [
        ("glm4-moe", "model.layers.3.eh_proj.weight", {}),
        ("minimax-m2", "model.layers.4.mlp.gate.weight", {"num_mtp_modules": 2}),
        ("hy-v3", "model.layers.3.enorm.weight", {}),
        ("ernie45-moe", "model.mtp_block.0.mlp.down_proj.weight", {}),
    ],
)
def test_layers_that_draft_are_left_out(
    name: str, tensor: str, config: dict[str, object], model_dir: ModelDir, tmp_path: Path
) -> None:
    path = edited(shutil.copytree(model_dir(name), tmp_path / name), {tensor: torch.ones(3)}, **config)
    ids = prompt(20)
    logits = Ring(load_model(path)).step(chunks=[("a", ids)])["a"]
    assert_same(logits, exact_logits(model_dir(name), ids))
    other = tensor.replace("layers.", "layers.1").replace("mtp_block", "block")
    edited(path, {other: torch.ones(3)})
    with pytest.raises(ModelError, match=f"has no place for tensor {other}"):
        load_model(path)


def test_language_model_beside_an_encoder(model_dir: ModelDir, tmp_path: Path) -> None:
    """Llama 4 as it is published: names behind "language_model.", fields in "text_config"."""
    bare, path, ids = model_dir("llama4"), tmp_path / "wrapped", prompt(60)
    path.mkdir()
    text = json.loads((bare / "config.json").read_text())
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text}
    (path / "config.json").write_text(json.dumps(whole))
    tensors = {f"language_model.{n}": tensor for n, tensor in load_file(bare / "model.safetensors").items()}
    tensors |= {name: torch.ones(2, 2) for name in ("vision_model.conv.weight", "multi_modal_projector.w")}
    save_file(tensors, path / "model.safetensors")
    logits = Ring(load_model(path)).step(chunks=[("a", ids)])["a"]
    assert_same(logits, exact_logits(bare, ids))


def test_long_prompts_of_phi_have_their_own_angles(model_dir: ModelDir) -> None:
    """Long prompts have angles as the authors have them. transformers 5 takes the factor of long prompts, but
    the frequencies of short ones."""
    config = ModelConfig.from_dir(model_dir("phimoe"))
    positions = torch.tensor([3, 200])
    cos, sin = RotaryEmbedding(config.rope, 16, 1024)(positions, torch.tensor([256, 257]))
    plain = 10_000.0 ** -(torch.arange(8) / 8)
    for row, (scale, factors) in enumerate(
        [(1.2, config.rope.short_factors), (1.3, config.rope.long_factors)]
    ):
        angles = positions[row] * plain / torch.tensor(factors)
        torch.testing.assert_close(cos[row, 0, 8:], scale * angles.cos(), rtol=0, atol=1e-4)
        torch.testing.assert_close(sin[row, 0, 8:], scale * angles.sin(), rtol=0, atol=1e-4)
    assert config.longest_shared_prompt == 256


FIRST = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {FIRST: None}, f"tensor {FIRST} is missing"),
        (
            "mixtral",
            {FIRST: torch.ones(48, 64)},
            rf"safetensors: tensor {FIRST} has shape \[48, 64\]; expected \[64, 48\]",
        ),
        (
            "mixtral",
            {FIRST.replace("experts.3", "experts.5"): torch.ones(64, 48)},
            "safetensors: MixtralForCausalLM has no place for tensor .*experts.5.w2.weight",
        ),
        (
            "mixtral",
            {"model.layers.0.block_sparse_moe.gate.weight": torch.ones(4, 64)},
            r"safetensors: tensor .*gate.weight has shape \[4, 64\]; expected \[5, 64\]",
        ),
        (
            "granite-moe",
            {"model.layers.0.block_sparse_moe.input_linear.weight": torch.ones(5, 88, 64)},
            r"safetensors: tensor .*input_linear.weight has shape \[5, 88, 64\]; expected \[6, 88, 64\]",
        ),
        (
            "gpt-oss",
            {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(6, 88, 64)},
            r"safetensors: tensor .*gate_up_proj has shape \[6, 88, 64\]; expected \[6, 64, 88\]",
        ),
        (
            "ernie45-moe",
            {"model.layers.1.mlp.moe_statics.e_score_correction_bias": torch.ones(6)},
            r"safetensors: tensor .*correction_bias has shape \[6\]; expected \[1, 6\]",
        ),
        (
            "qwen2-moe",
            {"model.layers.2.mlp.shared_expert_gate.weight": None},
            "tensor model.layers.2.mlp.shared_expert_gate.weight is missing",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    name: str, changes: dict[str, Tensor | None], message: str, model_dir: ModelDir, tmp_path: Path
) -> None:
    path = edited(shutil.copytree(model_dir(name), tmp_path / name), changes)
    with pytest.raises(ModelError, match=message):
        load_model(path)


def test_an_expert_that_comes_twice(model_dir: ModelDir, tmp_path: Path) -> None:
    path = shutil.copytree(model_dir("mixtral"), tmp_path / "model")
    (path / "model.safetensors").rename(path / "1.safetensors")
    save_file({FIRST: torch.ones(64, 48)}, path / "2.safetensors")
    names = {"a": "1.safetensors", FIRST: "2.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=rf"2.safetensors: tensor {FIRST} comes a second time"):
        load_model(path)
