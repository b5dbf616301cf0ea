"""What a worker computes in where nobody says, and that every thread which computes on a CUDA device makes it
its own, and no CPU's kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from baton.engine import device, runner
from baton.engine.config import EngineConfig
from baton.engine.device import choose_dtype, device_memory, exact_device
from baton.engine.rank_start import LoadedRank, layout_of, load_rank, part_of
from baton.engine.runner import ModelRunner
from baton.process.start_clock import StartClock
from baton_kernels.cpu import library
from baton_kernels.kv_layout import KVLayout
from tests.support.tiny_models import ModelDir


@pytest.mark.parametrize(
    ("saved", "kernels", "instructions", "chosen"),
    [
        ("float32", True, True, "float32"),
        ("bfloat16", True, True, "bfloat16"),
        ("bfloat16", True, False, "bfloat16"),
        ("bfloat16", False, True, "bfloat16"),
        ("bfloat16", False, False, "float32"),
        ("float16", True, True, "float32"),
        ("float16", False, False, "float32"),
    ],
)
def test_auto_is_what_is_fast(
    saved: str,
    kernels: bool,
    instructions: bool,
    chosen: str,
    model_dir: ModelDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "kernels_for", lambda *_: object() if kernels else None)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": instructions})
    fields = json.loads((model_dir("llama") / "config.json").read_text())
    fields.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(fields | {"torch_dtype": saved}))
    assert choose_dtype("auto", "cpu", tmp_path) == chosen
    assert choose_dtype("auto", "cuda", tmp_path) == "auto"
    assert choose_dtype("float16", "cpu", tmp_path) == "float16"


@dataclass
class Cuda:
    """Two devices of which only their numbers are there: takes the place of ``torch.cuda``'s functions."""

    current: int = 0
    entered: list[torch.device] = field(default_factory=list)

    def set_device(self, entered: torch.device) -> None:
        assert entered.index is not None, "torch refuses a device without a number"
        self.entered.append(entered)
        self.current = entered.index


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """Building the CPU's kernels fails."""
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "set_device", cuda.set_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda.current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    memories = {torch.device("cuda", 0): 1 << 30, torch.device("cuda", 1): 2 << 30}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda one: SimpleNamespace(total_memory=memories[one])
    )

    def built() -> Path:
        raise AssertionError("a worker on CUDA builds the CPU's kernels")

    monkeypatch.setattr(library, "library", built)
    library.native.cache_clear()
    yield cuda
    library.native.cache_clear()


def loaded(config: EngineConfig, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> LoadedRank:
    """What loading comes to without the weights."""
    monkeypatch.setattr("baton.engine.rank_start.load_model", lambda *_: MagicMock())
    monkeypatch.setattr("baton.engine.rank_start.kv_layout", lambda *_: KVLayout.of_one(16))
    monkeypatch.setattr("baton.engine.rank_start.GroupCollectives", lambda *_: None)
    return load_rank(part_of(config, rank, layout_of(config, 1)), StartClock())


@pytest.mark.parametrize(("name", "number"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_the_thread_that_loads_is_on_the_named_device(
    name: str, number: int, model_dir: ModelDir, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = loaded(EngineConfig(model_dir("llama"), device=name), monkeypatch)
    assert rank.device == torch.device("cuda", number)
    assert cuda.entered == [rank.device]


def test_a_name_without_a_number_is_the_callers_own_device(cuda: Cuda) -> None:
    cuda.current = 1
    assert exact_device("cuda") == torch.device("cuda", 1)
    assert exact_device("cuda:0") == torch.device("cuda", 0)
    assert device_memory("cuda") == 2 << 30
    assert device_memory("cuda:0") == 1 << 30
    assert device_memory("cpu") == 0


def test_each_of_several_ranks_has_the_next_device(
    model_dir: ModelDir, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model_dir("llama"), device="cuda", tensor_parallel_size=2)
    for number in range(2):
        assert loaded(config, monkeypatch, number).device == torch.device("cuda", number)
    assert [one.index for one in cuda.entered] == [0, 1]


def test_the_engines_thread_enters_the_device_and_leaves_the_cores_alone(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bind_threads", "release_threads"):
        monkeypatch.setattr(runner, name, lambda: pytest.fail("threads of the CPU's kernels"))
    there = torch.device("cuda", 1)
    of_cuda = ModelRunner(None, torch.zeros(1), 16, there)  # type: ignore[arg-type]
    of_cuda.enter()
    of_cuda.leave()
    assert cuda.entered == [there]


def test_the_engines_thread_of_a_cpu_has_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("bind_threads", "release_threads"):
        monkeypatch.setattr(runner, name, lambda name=name: done.append(name))
    of_cpu = ModelRunner(None, torch.zeros(1), 16, torch.device("cpu"))  # type: ignore[arg-type]
    of_cpu.leave()
    of_cpu.enter()
    assert done == ["release_threads", "bind_threads"]
