"""What every form of quantized checkpoint promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.experts import Experts
from baton.models.latent_attention import LatentAttention
from baton.models.layers import Linear
from baton.models.loader import fill, load_model, places_of, scheme_of, weight_files
from baton.models.quantization.quantized import QuantizedExperts
from baton.parallel.collectives import Parallel
from baton.process.options import ModelError
from tests.support.exact import alike, assert_same, exact_logits
from tests.support.laid_out import LaidOut
from tests.support.model_ring import prompt
from tests.support.rank_threads import in_ranks
from tests.support.tiny_models import oracle_greedy

IDS = prompt(45)
TOKENS = 6


def logits_of(model: CausalLM) -> Tensor:
    """The logits of a prompt."""
    return LaidOut(model, 16).step({"a": IDS})["a"]


def greedy(model: CausalLM) -> list[int]:
    """The first tokens of the answer."""
    laid, step, answer = LaidOut(model, 16), IDS, list[int]()
    while len(answer) < TOKENS:
        answer.append(int(laid.step({"a": step})["a"][-1].argmax()))
        step = answer[-1:]
    return answer


def loaded(path: Path) -> Decoder:
    """The model as it is before its weights are packed."""
    config = ModelConfig.from_dir(path)
    model = Decoder(config, torch.float32, Parallel.alone(config), scheme_of(config, "auto"))
    fill(replace(places_of(model, model), harmless=lambda file, name: True), path, weight_files(path))
    return model


def weights_of(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The names of matrices, and the matrices as plain numbers."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.weights is not None:
            yield name, module.weights.plain()
        if isinstance(module, LatentAttention) and module._up_weights is not None:
            yield f"{name}.up", module._up_weights.plain()
        if isinstance(module, Experts) and module.weights is not None:
            for matrix, parameter in module.weights.matrices.items():
                if not isinstance(module.weights, QuantizedExperts):
                    yield f"{name}.{matrix}", parameter
            if isinstance(module.weights, QuantizedExperts):
                for matrix, slots in module.weights.slots.items():
                    yield f"{name}.{matrix}", slots.weight().dequantized()


def assert_stands_for(packed: Path, meant: Path) -> CausalLM:
    """Checks that the packed model is the one that is meant: its weights bit by bit, its logits and its
    answer as transformers has them. Returns it."""
    expected = dict(weights_of(loaded(meant)))
    for name, weight in weights_of(loaded(packed)):
        assert torch.equal(weight, expected.pop(name)), name
    assert not expected
    model = load_model(packed, "float32")
    assert_same(logits_of(model), exact_logits(meant, IDS))
    assert greedy(model) == oracle_greedy(meant, IDS, TOKENS)[0]
    return model


def assert_split_alike(packed: Path, plain: Path) -> None:
    """Checks that two ranks compute what one does. ``plain``: a model of the same sizes that transformers
    reads."""
    whole = alike(logits_of(load_model(packed)), exact_logits(plain, IDS))
    assert_same(in_ranks(packed, 2, 1, logits_of, quantization="auto")[0], whole)


def refusal(path: Path) -> str:
    """The one line with which the model is refused, without the directory."""
    with pytest.raises(ModelError) as refused:
        load_model(path)
    message = str(refused.value)
    assert "\n" not in message
    return message.replace(f"{path}/", "").removeprefix("model.safetensors: ")


def refusal_in_ranks(path: Path) -> str:
    """The one line with which the model is refused that is split in two."""
    with pytest.raises(ModelError) as refused:
        in_ranks(path, 2, 1, logits_of, quantization="auto")
    return str(refused.value)
