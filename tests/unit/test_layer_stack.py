"""All layers in one call of the CPU's kernels: the same numbers as layer by layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.models.decoder import Decoder
from baton.models.loader import load_model
from baton.models.quantization.registry import Quantization
from baton_kernels.cpu.layers import LayerStack
from tests.support.model_ring import Ring, prompt
from tests.support.threads import in_threads
from tests.support.tiny_models import ModelDir

NAMES = ("llama", "llama-biased-mqa", "llama-dynamic", "qwen2-window", "qwen3", "qwen3-biased-window")


def model_of(model_dir: ModelDir, name: str, dtype: str, quantization: Quantization) -> Decoder:
    model = load_model(model_dir(name), dtype=dtype, quantization=quantization)
    assert isinstance(model, Decoder)
    return model


def answers(model: Decoder) -> list[Tensor]:
    """The logits of steps of every make, and the pool that they leave."""
    ring = Ring(model, num_blocks=160)
    a, b, c = prompt(75, seed=1), prompt(103, seed=2), prompt(600, seed=3)
    steps = [
        ring.step(chunks=[("a", a[:7]), ("b", b[:40])]),
        ring.step(chunks=[("b", b[40:41]), ("a", a[7:50])]),
        ring.step([("a", a[50])], [("b", b[41:80]), ("c", c[:590])]),
        ring.step([("b", b[80]), ("a", a[51]), ("c", c[590])]),  # one of them in two shares
        ring.step([("a", a[52])]),
    ]
    wanted = ring.step_wanted([("a", a[53:60]), ("b", b[81:90])], ["b"])
    return [*(logits for step in steps for logits in step.values()), *wanted, ring.pool]


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_is_what_its_layers_are(
    name: str, dtype: str, quantization: Quantization, model_dir: ModelDir
) -> None:
    model = model_of(model_dir, name, dtype, quantization)
    assert model.stack is not None
    stacked = answers(model)
    model.stack = None
    for ours, one_by_one in zip(stacked, answers(model), strict=True):
        assert torch.equal(ours, one_by_one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3-biased-window"])
def test_threads_change_nothing(name: str, dtype: str, model_dir: ModelDir) -> None:
    """But the order of the sums of a prompt's attention, which comes in runs if there are few heads."""
    model = model_of(model_dir, name, dtype, "none")
    alone = answers(model)
    for threads in (2, 3, 5):
        with in_threads(threads):
            together = answers(model)
        for ours, expected in zip(together, alone, strict=True):
            if dtype == "float32":
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=4e-4)
            else:
                assert (ours - expected).norm() <= 1e-2 * expected.norm()


def test_is_used(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = model_of(model_dir, "llama", "float32", "none"), list[int]()
    run = LayerStack.run

    def counted(stack: LayerStack, count: int, *rest: Tensor) -> Tensor:
        counts.append(count)
        return run(stack, count, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerStack, "run", counted)
    ring = Ring(model)
    ring.step(chunks=[("a", prompt(5))])
    ring.step_wanted([("b", prompt(5))], ["b"])
    layers = model.config.num_layers
    assert counts == [layers, layers - 1], "the last layer goes its own way where few rows are wanted"
