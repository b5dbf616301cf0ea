"""The weights of experts from checkpoints of each form, split over ranks, and the layer that computes with
them, against transformers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from baton.models.base import CausalLM
from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expected_tensors import TensorPlaces
from baton.models.experts import Experts
from baton.models.layers import Linear
from baton.models.loader import _draw_weights, fill
from baton.models.quantization.base import ExpertsShape, ExpertsWeights, Place, QuantizationScheme
from baton.models.quantization.experts_format import (
    FUSED,
    INTERLEAVED,
    NUMBERED,
    SEPARATE,
    TRANSPOSED,
    ExpertNames,
)
from baton.models.quantization.plain import PLAIN
from baton.models.quantization.registry import SCHEMES, Quantization
from baton.models.weight_file import WeightFile
from baton.parallel.collectives import Alone, Parallel
from baton.parallel.shard import Shard
from baton.process.options import ModelError
from baton_kernels.activation_kind import SILU, Activation
from baton_kernels.cpu.experts import PackedExperts
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.kv_layout import KVLayout
from baton_kernels.paged import PagedBatch
from baton_kernels.routing_rule import Routing

EXPERTS, HIDDEN, INNER = 5, 32, 24
FORMS = {names.form: names for names in (SEPARATE, FUSED, TRANSPOSED, INTERLEAVED)}


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> QuantizationScheme:
    return scheme_of(request.param)


def scheme_of(name: Quantization) -> QuantizationScheme:
    scheme: QuantizationScheme = resolve_name(SCHEMES[name])
    return scheme


@dataclass(frozen=True)
class Whole:
    """Tensors of whole experts, whose rows differ in size."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor
    up_bias: Tensor
    down_bias: Tensor

    @classmethod
    def drawn(cls, hidden: int = HIDDEN) -> Whole:
        generator = torch.Generator().manual_seed(1)

        def tensor(*shape: int) -> Tensor:
            rows = torch.arange(1, shape[1] + 1).view(-1, *[1] * (len(shape) - 2))
            return torch.randn(shape, generator=generator) * rows

        weights = (tensor(EXPERTS, rows, cols) for rows, cols in [(INNER, hidden)] * 2 + [(hidden, INNER)])
        return cls(*weights, *(tensor(EXPERTS, rows) for rows in (INNER, INNER, hidden)))

    def checkpoint(self, names: ExpertNames, bias: bool) -> dict[str, Tensor]:
        """The experts as a checkpoint of this form has them."""
        if names.form == "separate":
            parts = {
                names.gate: (self.gate, self.gate_bias),
                names.up: (self.up, self.up_bias),
                names.down: (self.down, self.down_bias),
            }
            weights = {
                stem.format(e) + names.weight: weight[e]
                for stem, (weight, _) in parts.items()
                for e in range(EXPERTS)
            }
            biases = {
                stem.format(e) + names.bias: own[e]
                for stem, (_, own) in parts.items()
                for e in range(EXPERTS)
            }
        else:
            both, both_bias = (
                self._joined(names, self.gate, self.up),
                self._joined(names, self.gate_bias, self.up_bias),
            )
            turned = names.form != "fused"
            weights = {
                names.gate_up + names.weight: both.mT if turned else both,
                names.down + names.weight: self.down.mT if turned else self.down,
            }
            biases = {names.gate_up + names.bias: both_bias, names.down + names.bias: self.down_bias}
        return {name: t.contiguous() for name, t in {**weights, **(biases if bias else {})}.items()}

    @staticmethod
    def _joined(names: ExpertNames, gate: Tensor, up: Tensor) -> Tensor:
        if names.form == "interleaved":
            return torch.stack((gate, up), dim=2).flatten(1, 2)
        return torch.cat((gate, up), dim=1)


def shape_of(
    inner: range = range(INNER), *, bias: bool = False, down_bias: bool | None = None
) -> ExpertsShape:
    adds = bias if down_bias is None else down_bias
    return ExpertsShape(range(EXPERTS), HIDDEN, inner, torch.float32, SILU, bias, adds)


def load(weights: ExpertsWeights, names: ExpertNames, tensors: Mapping[str, Tensor]) -> None:
    for name, place in weights.places(names).items():
        place.load(tensors[name])


def loaded(scheme: QuantizationScheme, names: ExpertNames, shape: ExpertsShape) -> ExpertsWeights:
    weights = scheme.allocate_experts(shape, names)
    load(weights, names, Whole.drawn().checkpoint(names, shape.bias))
    return weights


def matrix_of(weights: ExpertsWeights, name: str) -> Tensor:
    """The matrices of all experts, or the codes that stand for them."""
    matrices = weights.matrices
    return matrices[name] if name in matrices else matrices[f"{name}_codes"]


def routed(tokens: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, and the experts and weights of each token."""
    generator = torch.Generator().manual_seed(2)
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(tokens)])
    return (
        torch.randn(tokens, HIDDEN, generator=generator),
        experts.int(),
        torch.rand(tokens, 2, generator=generator),
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_places_have_the_names_and_shapes_of_the_checkpoint(
    form: str, bias: bool, scheme: QuantizationScheme
) -> None:
    places = scheme.allocate_experts(shape_of(bias=bias), FORMS[form]).places(FORMS[form])
    tensors = Whole.drawn().checkpoint(FORMS[form], bias)
    assert {name: place.shape for name, place in places.items()} == {
        name: tensor.shape for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("inner", [range(INNER), range(10, 16)])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same_experts(form: str, inner: range, scheme: QuantizationScheme) -> None:
    """All of their rows, or a rank's; the memory is filled with what no form has."""
    whole = Whole.drawn()
    here = slice(inner.start, inner.stop)
    weights = scheme.allocate_experts(shape_of(inner, bias=True), FORMS[form])
    for parameter in weights.parameters.values():
        parameter.fill_(99)
    load(weights, FORMS[form], whole.checkpoint(FORMS[form], bias=True))
    unsplit = loaded(scheme, SEPARATE, shape_of(bias=True))
    if scheme is PLAIN:
        assert torch.equal(
            matrix_of(weights, "gate_up"), torch.cat((whole.gate[:, here], whole.up[:, here]), 1)
        )
        assert torch.equal(matrix_of(weights, "down"), whole.down[:, :, here])
    rows = torch.arange(2 * INNER).view(2, INNER)[:, here].flatten()
    assert torch.equal(matrix_of(weights, "gate_up"), matrix_of(unsplit, "gate_up")[:, rows])
    assert torch.equal(matrix_of(weights, "down"), matrix_of(unsplit, "down")[:, :, here])
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    assert torch.equal(weights.gate_up_bias, torch.cat((whole.gate_bias, whole.up_bias), 1)[:, rows])
    assert torch.equal(weights.down_bias, whole.down_bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_parts_of_ranks_add_up(form: str, bias: bool, scheme: QuantizationScheme) -> None:
    x, experts, weights = routed()
    whole = loaded(scheme, FORMS[form], shape_of(bias=bias)).pack()
    assert isinstance(whole, PackedExperts)
    parts = [
        loaded(scheme, FORMS[form], shape_of(inner, bias=bias, down_bias=bias and inner.start == 0)).pack()
        for inner in (range(14), range(14, INNER))
    ]
    together = sum(part.multiply(x, experts, weights, False) for part in parts)
    out = whole.multiply(x, experts, weights, False)
    torch.testing.assert_close(together, out, rtol=1e-4, atol=1e-5 * float(out.abs().max()))


@pytest.mark.parametrize("weighs_input", [False, True])
def test_packed_experts_compute_as_plain_torch_does(weighs_input: bool, scheme: QuantizationScheme) -> None:
    x, experts, weights = routed()
    own = loaded(scheme, SEPARATE, shape_of(bias=True))
    before = own.multiply(x, experts, weights, weighs_input)
    packed = own.pack()
    assert packed is not own
    out = packed.multiply(x, experts, weights, weighs_input)
    torch.testing.assert_close(out, before, rtol=1e-4, atol=1e-5 * float(before.abs().max()))


def test_experts_that_nothing_packs_stay(scheme: QuantizationScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedExperts, "of", lambda *args, **options: None)
    own = loaded(scheme, SEPARATE, shape_of())
    assert own.pack() is own


def test_int8_refuses_odd_sizes() -> None:
    with pytest.raises(ModelError, match="a projection of 11 inputs"):
        scheme_of("int8").allocate_experts(shape_of(range(11)), SEPARATE)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def config_of(experts: ExpertsConfig) -> ModelConfig:
    config = ModelConfig.from_dict(CONFIG)
    return replace(config, experts=experts, expert_layers=(True,) * config.num_layers)


class OnlyExperts(CausalLM):
    """A model of nothing but one layer's experts."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, parallel: Parallel, scheme: QuantizationScheme
    ) -> None:
        super().__init__(config, dtype, parallel, scheme)
        self.mlp = Experts(config, dtype, parallel, scheme)

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        raise NotImplementedError

    def embed(self, token_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def lay_out(self, layout: KVLayout) -> None:
        raise NotImplementedError

    def pack(self) -> None:
        self.mlp.pack()
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def checkpoint_tensors(self) -> dict[str, Place]:
        places = self.mlp.places()
        for path, module in self.mlp.named_modules():
            if module in self.mlp.placed:
                continue
            if isinstance(module, Linear) and module.weights is not None:
                parent = path.rpartition(".")[0]
                for part, tensors in module.weights.places().items():
                    stem = f"{parent}.{part}" if part else path
                    places |= {f"{stem}.{kind}": place for kind, place in tensors.items()}
        return places


def model_of(
    experts: ExpertsConfig,
    scheme: QuantizationScheme = PLAIN,
    dtype: torch.dtype = torch.float32,
    rank: int = 0,
    ranks: int = 1,
) -> OnlyExperts:
    """A rank's part, whose collectives leave it as it is."""
    config = config_of(experts)
    return OnlyExperts(config, dtype, Parallel(Shard.of(config, rank, ranks, 1), Alone()), scheme)


def shapes_of(experts: ExpertsConfig) -> dict[str, torch.Size]:
    return {name: place.shape for name, place in model_of(experts).checkpoint_tensors().items()}


def plain_config(names: ExpertNames = SEPARATE, *, bias: bool = False) -> ExpertsConfig:
    return ExpertsConfig(EXPERTS, INNER, Routing(2, renormalize=True), names, bias=bias)


class TestFiles:
    def fill(
        self, path: Path, names: ExpertNames, change: Callable[[dict[str, Tensor]], object]
    ) -> OnlyExperts:
        """A model filled from a file, whose tensors ``change`` changes first."""
        experts = plain_config(names, bias=True)
        tensors = {
            "gate.weight": torch.randn(EXPERTS, HIDDEN),
            **Whole.drawn().checkpoint(names, bias=True),
        }
        change(tensors)
        save_file(tensors, path / "model.safetensors")
        model = model_of(experts)
        places = TensorPlaces(model.checkpoint_tensors(), shapes_of(experts), "test")
        fill(places, path, [*map(WeightFile.of, path.glob("*.safetensors"))])
        return model

    @pytest.mark.parametrize("form", FORMS)
    def test_experts_are_loaded(self, form: str, tmp_path: Path) -> None:
        model, whole = self.fill(tmp_path, FORMS[form], lambda tensors: None), Whole.drawn()
        assert model.mlp.weights is not None
        assert torch.equal(matrix_of(model.mlp.weights, "gate_up"), torch.cat((whole.gate, whole.up), 1))

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("kind", ["weight", "bias"])
    def test_a_missing_tensor(self, form: str, kind: str, tmp_path: Path) -> None:
        name = self.name(form, kind)
        with pytest.raises(ModelError) as error:
            self.fill(tmp_path, FORMS[form], lambda tensors: tensors.pop(name))
        assert str(error.value) == f"{tmp_path}: tensor {name} is missing"

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("kind", ["weight", "bias"])
    def test_a_tensor_of_another_shape(self, form: str, kind: str, tmp_path: Path) -> None:
        name, file = self.name(form, kind), tmp_path / "model.safetensors"
        right = list(shapes_of(plain_config(FORMS[form], bias=True))[name])
        with pytest.raises(ModelError) as error:
            self.fill(
                tmp_path, FORMS[form], lambda tensors: tensors.update({name: tensors[name][..., 1:].clone()})
            )
        wrong = [*right[:-1], right[-1] - 1]
        assert str(error.value) == f"{file}: tensor {name} has shape {wrong}; expected {right}"

    @pytest.mark.parametrize("form", FORMS)
    def test_a_tensor_that_comes_twice(self, form: str, tmp_path: Path) -> None:
        name = self.name(form, "weight")

        def twice(tensors: dict[str, Tensor]) -> None:
            save_file({name: tensors[name]}, tmp_path / "again.safetensors")

        with pytest.raises(ModelError, match=f"tensor {name} comes a second time"):
            self.fill(tmp_path, FORMS[form], twice)

    def test_an_expert_too_many(self, tmp_path: Path) -> None:
        name = SEPARATE.up.format(EXPERTS) + ".weight"
        with pytest.raises(ModelError, match=f"model.safetensors: test has no place for tensor {name}"):
            self.fill(tmp_path, SEPARATE, lambda tensors: tensors.update({name: torch.zeros(INNER, HIDDEN)}))

    def name(self, form: str, kind: str) -> str:
        names = FORMS[form]
        stem = names.gate_up or names.up.format(3)
        return stem + (names.weight if kind == "weight" else names.bias)


@pytest.mark.parametrize("form", FORMS)
def test_drawn_experts_do_not_depend_on_the_split(form: str, scheme: QuantizationScheme) -> None:
    experts = replace(
        plain_config(FORMS[form], bias=True),
        correction_bias="correction_bias",
        shared="shared_expert",
        shared_inner=20,
    )
    shapes = shapes_of(experts)
    models = [model_of(experts, scheme, rank=rank, ranks=ranks) for rank, ranks in ((0, 1), (0, 2), (1, 2))]
    for model in models:
        for parameter in model.parameters():
            parameter.fill_(99)
        _draw_weights(model, shapes, 5)
    whole, *parts = (cast(ExpertsWeights, model.mlp.weights) for model in models)
    halves = [
        torch.cat([matrix_of(part, "gate_up").chunk(2, 1)[half] for part in parts], 1) for half in (0, 1)
    ]
    assert torch.equal(torch.cat(halves, 1), matrix_of(whole, "gate_up"))
    assert torch.equal(torch.cat([matrix_of(part, "down") for part in parts], 2), matrix_of(whole, "down"))
    assert len({float(row) for row in matrix_of(whole, "gate_up").float().flatten(1).sum(1)}) == EXPERTS
    for model in models:
        biases = [p for name, p in model.named_parameters() if name.endswith(("bias", "correction"))]
        assert len(biases) >= 2
        assert not any(bias.any() for bias in biases)
    if scheme is PLAIN:
        for weight, inputs in ((matrix_of(whole, "gate_up"), HIDDEN), (matrix_of(whole, "down"), INNER)):
            assert 0.9 < float(weight.std()) * inputs**0.5 < 1.1


@dataclass(frozen=True)
class Block:
    """A family's MLP in transformers, and the config that stands for it."""

    module: str
    block: str
    config: str
    experts: ExpertsConfig
    options: Mapping[str, object] = field(default_factory=dict)
    gate_up_is_transposed: bool = False


TOP_2 = Routing(2, renormalize=True)
BLOCKS = {
    "mixtral": Block(
        "mixtral",
        "MixtralSparseMoeBlock",
        "MixtralConfig",
        ExpertsConfig(EXPERTS, INNER, TOP_2, NUMBERED),
        {"intermediate_size": INNER},
    ),
    "qwen2_moe": Block(
        "qwen2_moe",
        "Qwen2MoeSparseMoeBlock",
        "Qwen2MoeConfig",
        ExpertsConfig(
            EXPERTS,
            INNER,
            Routing(2),
            shared="shared_expert",
            shared_inner=20,
            shared_gate="shared_expert_gate",
        ),
        {"moe_intermediate_size": INNER, "shared_expert_intermediate_size": 20},
    ),
    "deepseek_v3": Block(
        "deepseek_v3",
        "DeepseekV3MoE",
        "DeepseekV3Config",
        ExpertsConfig(
            EXPERTS,
            INNER,
            Routing(2, "sigmoid", renormalize=True, scale=2.5),
            router_float32=True,
            correction_bias="gate.e_score_correction_bias",
            shared="shared_experts",
            shared_inner=INNER,
        ),
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": INNER,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "ernie4_5_moe": Block(
        "ernie4_5_moe",
        "Ernie4_5_MoeSparseMoeBlock",
        "Ernie4_5_MoeConfig",
        ExpertsConfig(
            EXPERTS,
            INNER,
            replace(TOP_2, least_sum=1e-12),
            router_float32=True,
            correction_bias="gate.moe_statics.e_score_correction_bias",
            correction_rows=1,
            shared="shared_experts",
            shared_inner=2 * INNER,
        ),
        {"moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": INNER, "moe_num_shared_experts": 2},
    ),
    "gpt_oss": Block(
        "gpt_oss",
        "GptOssMLP",
        "GptOssConfig",
        ExpertsConfig(
            EXPERTS,
            INNER,
            TOP_2,
            INTERLEAVED,
            activation=Activation("clamped_swiglu", 0.3),
            bias=True,
            router="router",
            router_bias=True,
        ),
        {"intermediate_size": INNER, "swiglu_limit": 0.3},
    ),
    "granitemoe": Block(
        "granitemoe",
        "GraniteMoeMoE",
        "GraniteMoeConfig",
        ExpertsConfig(EXPERTS, INNER, TOP_2, FUSED, router="router.layer"),
        {"intermediate_size": INNER},
    ),
    "llama4": Block(
        "llama4",
        "Llama4TextMoe",
        "Llama4TextConfig",
        ExpertsConfig(
            EXPERTS,
            INNER,
            Routing(1, "sigmoid", weighs_input=True),
            TRANSPOSED,
            router="router",
            shared="shared_expert",
            shared_inner=INNER,
        ),
        {"intermediate_size": INNER, "num_experts_per_tok": 1},
    ),
}


def transformers_block(block: Block) -> nn.Module:
    """The family's MLP with random weights."""
    package = f"transformers.models.{block.module}"
    options = {
        "hidden_size": HIDDEN,
        "num_local_experts": EXPERTS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        **block.options,
    }
    config = getattr(import_module(f"{package}.configuration_{block.module}"), block.config)(**options)
    config._experts_implementation = "eager"
    made = cast(nn.Module, getattr(import_module(f"{package}.modeling_{block.module}"), block.block)(config))
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.data.normal_(std=0.2)
    return made.eval()


def checkpoint_of(block: Block, made: nn.Module) -> dict[str, Tensor]:
    """The tensors of the block as checkpoints of its family have them: transformers fuses some as it
    loads."""
    names, found = block.experts.names, dict(made.state_dict())
    if "router.weight" in found and block.experts.router == "router.layer":
        found["router.layer.weight"] = found.pop("router.weight")
    if names.form == "separate":
        both, down = found.pop("experts.gate_up_proj"), found.pop("experts.down_proj")
        for e in range(EXPERTS):
            gate, up = both[e].chunk(2)
            parts = {names.gate: gate, names.up: up, names.down: down[e]}
            found |= {stem.format(e) + names.weight: tensor for stem, tensor in parts.items()}
    if names.form == "fused":
        found[names.gate_up + names.weight] = found.pop("experts.gate_up_proj")
        found[names.down + names.weight] = found.pop("experts.down_proj")
    return found


def computed(block: Block, tensors: Mapping[str, Tensor], x: Tensor, *, ranks: int = 1) -> Tensor:
    """What our layer computes, in so many ranks."""
    out = torch.zeros(x.shape)
    for rank in range(ranks):
        model = model_of(block.experts, rank=rank, ranks=ranks)
        places = model.checkpoint_tensors()
        missing = set(tensors) - set(places)
        assert all(name.endswith("bias") for name in missing), missing
        assert set(places) <= set(tensors)
        for name, place in places.items():
            place.load(tensors[name])
        before = model.mlp(x)
        model.pack()
        assert model.mlp.weights is None
        assert isinstance(model.mlp.experts, PackedExperts)
        assert isinstance(model.mlp.router.multiplier, PackedWeight)
        torch.testing.assert_close(model.mlp(x), before, rtol=1e-4, atol=1e-5)
        out += before
    return out


@pytest.mark.parametrize("name", BLOCKS)
def test_a_familys_experts(name: str) -> None:
    torch.manual_seed(3)
    block = BLOCKS[name]
    made, x = transformers_block(block), torch.randn(30, HIDDEN)
    with torch.inference_mode():
        found = made(x[None])
        wanted = (found[0] if isinstance(found, tuple) else found).view(30, HIDDEN)
        tensors = checkpoint_of(block, made)
        for ranks in (1, 2):
            torch.testing.assert_close(computed(block, tensors, x, ranks=ranks), wanted, rtol=1e-4, atol=2e-5)
    assert wanted.abs().max() > 0.05


def test_a_layer_gives_up_what_it_packed() -> None:
    model = model_of(plain_config())
    _draw_weights(model, shapes_of(plain_config()), 0)
    assert model.mlp.places()
    model.pack()
    assert not list(model.parameters())
    assert not model.mlp.places()


def test_the_router_keeps_float32_in_a_bfloat16_model() -> None:
    """A choice that bfloat16 would round away."""
    experts = replace(plain_config(), router_float32=True, routing=Routing(1))
    model = model_of(experts, dtype=torch.bfloat16)
    _draw_weights(model, shapes_of(experts), 0)
    router = model.get_parameter("mlp.router.weight")
    assert router.dtype == torch.float32
    router.data.zero_()
    router.data[:, 0] = torch.tensor([1.0, 1.0, 1.0, 1.0001, 1.0])
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    x[0, 0] = 1
    x[0, 1:] = torch.randn(HIDDEN - 1, generator=torch.Generator().manual_seed(0))
    weights = cast(ExpertsWeights, model.mlp.weights)
    alone = weights.multiply(x, torch.tensor([[3]]), torch.full((1, 1), 0.2), False)
    torch.testing.assert_close(model.mlp(x), alone, rtol=2e-2, atol=1e-3)
