"""``baton models --check``: what it says of checkpoints is what loading them finds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from baton.cli.main import commands
from baton.engine.capacity import DeviceMemory, capacity_of
from baton.engine.kv.page_counts import PageCounts
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.inspection import Inspection, inspect_checkpoint
from baton.models.loader import kv_layout, load_model, new_page_pool
from baton.models.quantization.registry import Quantization
from baton.models.weight_file import WeightFile
from baton.parallel.collectives import Alone, Parallel
from baton.parallel.shard import Shard
from baton.process.options import ModelError
from baton.worker.checkpoint import check_checkpoint
from baton.worker.config import WorkerConfig
from tests.support.tiny_models import ModelDir, save_llama

BLOCK_SIZE = 16
BLOCK = 32
MODELS = ("llama", "llama-tied-mha", "mixtral", "deepseek-v2", "qwen3-next", "gpt-oss")


def save_fp8(path: Path) -> Path:
    """A Llama with the matrices of its layers as codes of FP8, whose blocks share a scale of 1."""
    save_llama(path, intermediate_size=4 * BLOCK, num_key_value_heads=4)
    found, tensors = load_file(path / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in found.items():
        tensors[name] = tensor
        if tensor.dim() == 2 and name.startswith("model.layers."):
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(*(-(-size // BLOCK) for size in tensor.shape))
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fp8(tmp_path_factory.mktemp("fp8") / "model")


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models keep the weights that were loaded."""
    monkeypatch.setattr(Decoder, "pack", lambda self: None)


def compare(path: Path, quantization: Quantization, ranks: int) -> Inspection:
    """Compares what is said of each rank with the rank itself."""
    found = inspect_checkpoint(path, "auto", quantization, ranks)
    capacity = capacity_of(found, DeviceMemory(1 << 30, kv_bytes=10_000_000), BLOCK_SIZE, 100)
    for rank, said in enumerate(found.ranks):
        config = ModelConfig.from_dir(path)
        part = Parallel(Shard.of(config, rank, ranks, 1), Alone())
        model = load_model(path, parallel=part, quantization=quantization)
        held = {each.data_ptr(): each.nbytes for each in model.parameters()}
        head = model.tied_head() if isinstance(model, Decoder) else None
        held |= {each.data_ptr(): each.nbytes for each in head.parameters.values()} if head else {}
        assert said.num_bytes == sum(held.values())
        layout = kv_layout(model.config, BLOCK_SIZE, model.dtype, model.shard)
        pages = PageCounts(layout, BLOCK_SIZE).of(100)
        pool = new_page_pool(layout, pages, model.dtype, "cpu")
        assert capacity.sequence_bytes(rank) == pool.nbytes
        assert [kept.kind for kept in capacity.kept(rank)] == [group.kind for group in layout.groups]
    assert not found.problems
    return found


@pytest.mark.usefixtures("unpacked")
class TestBytes:
    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("name", MODELS)
    def test_of_plain_weights(self, name: str, ranks: int, model_dir: ModelDir) -> None:
        found = compare(model_dir(name), "auto", ranks)
        whole = load_model(model_dir(name))
        assert found.num_parameters == sum(each.numel() for each in whole.parameters())
        assert (found.scheme, dict(found.matrices)) == ("", {})

    @pytest.mark.parametrize("name", ["llama-tied-mha", "mixtral"])
    def test_of_weights_that_are_rounded(self, name: str, model_dir: ModelDir) -> None:
        found = compare(model_dir(name), "int8", 2)
        assert found.scheme == "int8"
        assert {"int8 by row"} == set(found.matrices)
        assert "model.embed_tokens" in found.plain

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_of_codes(self, ranks: int, fp8: Path) -> None:
        found = compare(fp8, "auto", ranks)
        layers = found.config.num_layers
        assert dict(found.matrices) == {"fp8 by 32x32, activations fp8-group": 7 * layers}
        assert found.plain == ("lm_head", "model.embed_tokens")
        plain = sum(tensor.numel() for tensor in load_file(fp8 / "model.safetensors").values())
        scales = sum(
            tensor.numel()
            for name, tensor in load_file(fp8 / "model.safetensors").items()
            if name.endswith("_scale_inv")
        )
        assert found.num_parameters == plain - scales


def test_windows_and_states_are_told(model_dir: ModelDir) -> None:
    found = inspect_checkpoint(model_dir("gpt-oss"))
    kinds = capacity_of(found, DeviceMemory(1 << 30), BLOCK_SIZE, 100).kept(0)
    windows = {window for window in found.config.windows if isinstance(window, int)}
    assert [(kept.kind, kept.window) for kept in kinds] == [("full", None), ("window", *windows)]
    config = found.config
    each = 2 * config.num_kv_heads * config.head_dim * 4
    assert all(kept.num_bytes == kept.num_layers * each for kept in kinds)


Edit = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("model.norm.weight"),
        lambda tensors: tensors.update({"model.extra": torch.zeros(2)}),
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}),
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
    ],
    ids=["missing", "no place", "shape", "type"],
)
def test_refusals_are_the_loaders(change: Edit, model_dir: ModelDir, tmp_path: Path) -> None:
    path = shutil.copytree(model_dir("llama"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError) as refusal:
        load_model(path)
    assert inspect_checkpoint(path).problems == (str(refusal.value),)


def test_all_refusals_are_told(model_dir: ModelDir, tmp_path: Path) -> None:
    path = shutil.copytree(model_dir("llama"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    save_file(
        {"a": torch.ones(1), **{name: tensors[name][:1] for name in tensors}}, path / "model.safetensors"
    )
    assert len(inspect_checkpoint(path).problems) == 1 + len(tensors)


def test_no_tensor_is_read(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def tensor(self: WeightFile, name: str) -> Tensor:
        raise AssertionError(name)

    monkeypatch.setattr(WeightFile, "tensor", tensor)
    inspect_checkpoint(model_dir("llama"))


GPU = 1 << 20


def check(path: Path, **options: int | float) -> dict[str, object]:
    given = [f"--{name}={value}" for name, value in options.items()]
    run = CliRunner().invoke(
        commands, ["models", "--json", "--check", str(path), *given], standalone_mode=False
    )
    told: dict[str, object] = json.loads(run.output)
    memory = told["memory"]
    assert isinstance(memory, dict)
    assert run.return_value == (0 if memory["holds"] else 1)
    return memory


class TestRoom:
    def test_of_a_gpu(self, model_dir: ModelDir) -> None:
        path = model_dir("llama")
        found = inspect_checkpoint(path)
        [rank] = found.ranks
        page = kv_layout(found.config, 64, torch.float32).page_bytes
        size = 2 * (rank.num_bytes + 10 * page)
        memory = check(path, **{"gpu-memory": size, "gpu-memory-utilization": 0.5, "length": 128})
        assert (memory["pages"], memory["sequences"], memory["longest"]) == (10, 5, 640)
        memory = check(path, **{"gpu-memory": rank.num_bytes + page - 1, "gpu-memory-utilization": 1})
        assert (memory["pages"], memory["sequences"]) == (0, 0)

    def test_of_two_gpus(self, model_dir: ModelDir) -> None:
        path = model_dir("llama")
        one = check(path, **{"gpu-memory": GPU, "length": 64})
        two = check(path, **{"gpu-memory": GPU, "length": 64, "tensor-parallel-size": 2})
        assert isinstance(one["sequences"], int)
        assert isinstance(two["sequences"], int)
        assert two["sequences"] > 2 * one["sequences"]

    def test_of_a_machine(self, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
        path = model_dir("llama")
        config = WorkerConfig(role="both", model=str(path), device="cpu", kv_cache_memory=1 << 20)
        [rank] = inspect_checkpoint(path).ranks
        for memory, holds in ((rank.num_bytes + (1 << 20), True), (rank.num_bytes + (1 << 19), False)):
            monkeypatch.setattr("baton.worker.checkpoint.machine_memory", lambda memory=memory: memory)
            assert check_checkpoint(config).is_fine is holds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "5"], "--length: can only be given together with --check"),
        (["--dtype", "float16"], "--dtype: can only be given together with --check"),
        (["--check", "demo", "--gpu-memory", "5 apples"], "--gpu-memory: '5 apples' is not a size"),
        (
            ["--check", "demo", "--length", "5000"],
            "--length: must be 1 to 4096, the longest sequence, not 5000",
        ),
        (["--check", "demo", "--gpu-memory-utilization", "0.5"], "--gpu-memory-utilization: must be above 0"),
        (
            ["--check", "demo", "--tensor-parallel-size", "3"],
            "tensor_parallel_size is 3; allowed for a model",
        ),
        (["--check", "/no/where"], "/no/where: no such directory"),
    ],
)
def test_bad_options(options: list[str], message: str) -> None:
    run = CliRunner().invoke(commands, ["models", *options])
    assert str(run.exception).startswith(message)
