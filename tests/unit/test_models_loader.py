"""What can be wrong with a directory of weights, each said in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.models.decoder import Decoder
from baton.models.expected_tensors import TensorPlaces
from baton.models.loader import fill, load_model
from baton.models.quantization.base import Place
from baton.models.weight_file import WeightFile
from baton.process.options import ModelError
from tests.support.tiny_mixtures import MIXTURES
from tests.support.tiny_models import TINY_MODELS

Edit = Callable[[dict[str, Tensor]], object]


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return TINY_MODELS["llama"](tmp_path / "single")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = TINY_MODELS["llama-sharded"](tmp_path / "sharded")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


def refusal(path: Path, **options: str) -> str:
    with pytest.raises(ModelError) as error:
        load_model(path, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


def edit(path: Path, change: Edit) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def configure(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_shards_hold_the_same_model(single: Path, sharded: Path) -> None:
    one, many = load_model(single), load_model(sharded)
    for (name, parameter), other in zip(one.named_parameters(), many.parameters(), strict=True):
        assert torch.equal(parameter, other), name


def test_dtypes(single: Path) -> None:
    for dtype, expected in (
        ("auto", torch.float32),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
    ):
        assert {parameter.dtype for parameter in load_model(single, dtype=dtype).parameters()} == {expected}
    assert "dtype is 'int8'; allowed: auto, float32" in refusal(single, dtype="int8")
    assert "load format is 'gguf'; allowed: auto, dummy" in refusal(single, load_format="gguf")


@pytest.mark.deep
def test_one_rank_loads_without_importing_sympy(single: Path) -> None:
    """It takes torch a second or two."""
    code = f"import sys; from baton.models.loader import load_model; load_model({str(single)!r})"
    code = f"from pathlib import Path; {code.replace(repr(str(single)), f'Path({str(single)!r})')}"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'sympy' not in sys.modules"], check=True)


def resident(file: Path) -> int:
    """Bytes of the file that are in this process's memory now by being mapped."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            ours = line.endswith(str(file))
        elif ours and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_a_ranks_own_rows_are_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    shape = torch.Size((1024, 8192))
    save_file({name: torch.full(shape, 1.0 + at) for at, name in enumerate(("mine", "others"))}, file)
    part = torch.empty(256, 8192)
    mapped: list[int] = []

    class MeasuredPlace(Place):
        def load(self, found: Tensor) -> None:
            super().load(found)
            mapped.append(resident(file))

    place = MeasuredPlace(part, (slice(512, 768), slice(None)))
    places = TensorPlaces({"mine": place}, {"mine": shape, "others": shape}, "test")
    fill(places, tmp_path, [WeightFile.of(file)], lambda done, total: mapped.append(resident(file)))
    assert (part == 1).all()
    # The system maps some pages around those that are wanted, up to a large one at either end.
    assert part.nbytes <= mapped[0] < part.nbytes + (5 << 20)
    assert mapped[1:] == [0, 0, 0]


def test_progress(sharded: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(sharded, progress=lambda done, total: seen.append((done, total)))
    total = sum(file.stat().st_size for file in sharded.glob("*.safetensors"))
    assert {entry[1] for entry in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 30
    assert seen[-1] == (total, total)


def test_dummy_needs_no_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    load_model(single, load_format="dummy")


def test_no_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    assert refusal(single) == (
        f"{single}: no weights: neither model.safetensors nor model.safetensors.index.json"
    )


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pt"]
)
def test_pickled_weights(name: str, single: Path) -> None:
    (single / "model.safetensors").rename(single / name)
    assert refusal(single) == f"{single}: weights are pickled ({name}); only safetensors are loaded"


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert refusal(sharded) == (
        f"{sharded}: shard {shard.name} is missing (model.safetensors.index.json lists it)"
    )


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}'])
def test_broken_index(index: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json: cannot be read as an index of weights" in refusal(sharded)


def test_an_index_nested_too_deep(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text('{"weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert f"{index}: cannot be read as an index of weights" in refusal(sharded)


def test_a_header_nested_too_deep(single: Path) -> None:
    header = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (single / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "model.safetensors: truncated or corrupt (nested deeper than 64 levels)" in refusal(single)


LARGE: list[tuple[dict[str, object], str]] = [
    ({"num_hidden_layers": 10_000}, "num_hidden_layers is 10000; allowed: at most 3, as in the weights"),
    (
        {"vocab_size": 2**31 - 1},
        "vocab_size and hidden_size make a matrix of 2147483647 x 64; allowed: at most",
    ),
    (
        {"hidden_size": 2**31 - 8, "head_dim": 16},
        "vocab_size and hidden_size make a matrix of 320 x 2147483640; allowed",
    ),
    (
        {"head_dim": 2**30},
        "num_attention_heads, head_dim and hidden_size make a matrix of 4294967296 x 64; allowed",
    ),
    ({"intermediate_size": 2**31 - 1}, "mlp.down_proj.weight has shape [64, 112]; expected [64, 2147483647]"),
    ({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}, "_proj.weight has shape"),
]


@pytest.mark.parametrize(("changes", "message"), LARGE, ids=[message[:40] for _, message in LARGE])
def test_sizes_that_are_not_those_of_the_files(
    changes: dict[str, object], message: str, single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is allocated for a model that its files are not of."""
    configure(single, **changes)
    allocated: list[str] = []
    build = Decoder.__init__

    def init(self: Decoder, *args: Any) -> None:
        allocated.append(torch.get_default_device().type)
        build(self, *args)

    monkeypatch.setattr(Decoder, "__init__", init)
    assert message in refusal(single)
    assert set(allocated) <= {"meta"}


def test_experts_that_are_not_in_the_files(tmp_path: Path) -> None:
    path = MIXTURES["mixtral"](tmp_path / "model")
    configure(path, num_local_experts=2**31 - 1)
    assert "the number of experts is 2147483647; allowed: at most 5, as in the weights" in refusal(path)


def test_sizes_that_no_memory_has(single: Path) -> None:
    configure(single, intermediate_size=2**31 - 1, hidden_size=2**31 - 8, head_dim=16)
    assert "config.json: describes no model that can be built (" in refusal(single, load_format="dummy")


def test_shard_outside_the_directory(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../single/model.safetensors"}}))
    assert "shard ../single/model.safetensors lies outside the directory" in refusal(sharded)


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -5000])
def test_truncated(keep: int, sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:keep])
    assert refusal(sharded).startswith(f"{shard}: truncated or corrupt (")


def test_corrupt_header(single: Path) -> None:
    file = single / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:40] = b"\xff" * 32
    file.write_bytes(data)
    assert refusal(single).startswith(f"{file}: truncated or corrupt (")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "the header is no JSON object"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "tensor a has no dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "tensor a has no dtype, shape and"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "tensor a has bytes 0 to 4, and its"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "tensor a begins at byte"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "tensors end at byte"),
        ({"a": {"dtype": "F4", "shape": [9], "data_offsets": [8, 0]}}, "tensor a has bytes 8 to 0"),
    ],
)
def test_headers_that_lie(header: object, message: str, tmp_path: Path) -> None:
    file, said = tmp_path / "model.safetensors", json.dumps(header).encode()
    file.write_bytes(len(said).to_bytes(8, "little") + said + bytes(8))
    with pytest.raises(ModelError) as error:
        WeightFile.of(file)
    assert str(error.value).startswith(f"{file}: truncated or corrupt ({message}")


def test_a_type_that_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    said = json.dumps({"a": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}}).encode()
    file.write_bytes(len(said).to_bytes(8, "little") + said + bytes(8))
    with pytest.raises(ModelError, match="tensor a is F4; allowed: F64, F32"):
        WeightFile.of(file).tensor("a")
    places = TensorPlaces({"a": Place(torch.empty(16), ())}, {"a": torch.Size((16,))}, "test")
    with pytest.raises(ModelError, match="tensor a is F4; allowed: float32, bfloat16, float16"):
        fill(places, tmp_path, [WeightFile.of(file)])


def test_missing_tensors(single: Path) -> None:
    edit(single, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    assert refusal(single) == f"{single}: tensor model.layers.1.self_attn.k_proj.weight is missing"
    edit(single, lambda tensors: tensors.pop("model.norm.weight"))
    assert refusal(single).endswith("k_proj.weight is missing, and 1 more")


def test_unexpected_tensor(single: Path) -> None:
    edit(single, lambda tensors: tensors.update({"model.layers.9.extra": torch.zeros(2)}))
    assert "LlamaForCausalLM has no place for tensor model.layers.9.extra" in refusal(single)


def test_bias_that_the_config_does_not_mention(single: Path) -> None:
    edit(single, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(112)}))
    assert "no place for tensor model.layers.0.mlp.up_proj.bias" in refusal(single)


def test_wrong_shape(single: Path) -> None:
    edit(
        single,
        lambda tensors: tensors.update({"model.layers.2.self_attn.v_proj.weight": torch.zeros(16, 64)}),
    )
    assert refusal(single) == (
        f"{single / 'model.safetensors'}: tensor model.layers.2.self_attn.v_proj.weight has shape [16, 64]; "
        "expected [32, 64]"
    )


def test_wrong_type(single: Path) -> None:
    edit(single, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    assert "model.norm.weight is int8; allowed: float32, bfloat16, float16" in refusal(single)


def test_tensor_twice(sharded: Path) -> None:
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    tensors = load_file(first)
    name = min(tensors)
    save_file({**load_file(second), name: tensors[name]}, second)
    assert f"tensor {name} comes a second time" in refusal(sharded)


def test_harmless_tensors(single: Path, tmp_path: Path) -> None:
    """Old checkpoints carry rotary frequencies, and tied ones sometimes a copy of the embedding."""
    edit(
        single,
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    )
    load_model(single)
    tied = TINY_MODELS["qwen3"](tmp_path / "tied")
    edit(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_model(tied)


def test_unknown_architecture(single: Path) -> None:
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    assert (
        "allowed: one of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
        in refusal(single)
    )


def test_missing_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == f"{tmp_path / 'none'}: no such directory"
