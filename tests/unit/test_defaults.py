"""The sizes of blocks and steps where nobody says: by the device, in one table, told in a line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import typer.main

from baton.cli.main import commands
from baton.engine.config import EngineConfig, EngineSettings
from baton.engine.defaults import CPU, CUDA, LARGE_BYTES, LARGE_CUDA, StepSizes, defaults_of
from baton.worker import start
from baton.worker.config import ROLES, WorkerConfig

MODEL = Path("model")


def test_a_cpu_keeps_its_own() -> None:
    assert EngineConfig(MODEL).sizes == StepSizes(16, 64, 512, 256)
    assert [CPU.mixed_prefill_tokens(role) for role in ROLES] == [None, 64, None]


def test_cuda_has_larger_ones_and_more_sequences_where_memory_allows() -> None:
    small = EngineConfig(MODEL, device="cuda:3", device_bytes=LARGE_BYTES - 1)
    large = EngineConfig(MODEL, device="cuda:3", device_bytes=LARGE_BYTES)
    assert small.sizes == StepSizes(64, 256, 8192, 2048)
    assert large.sizes == StepSizes(64, 512, 8192, 2048)
    assert EngineConfig(MODEL, device="cuda").sizes == small.sizes
    assert [CUDA.mixed_prefill_tokens(role) for role in ROLES] == [1024, 256, 1024]


def test_what_is_given_stays() -> None:
    config = EngineConfig(MODEL, device="cuda", max_num_seqs=7, prefill_chunk=96)
    assert config.sizes == StepSizes(64, 7, 8192, 96)
    limits = config.limits(4096)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.prefill_chunk) == (7, 8192, 96)


def test_two_that_do_not_go_together_are_refused_whatever_the_device() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens is 300; allowed: at least max_num_seqs"):
        EngineSettings(max_num_seqs=301, max_num_batched_tokens=300)
    EngineConfig(MODEL, max_num_batched_tokens=100)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 100; .* max_num_seqs \(256\)"):
        EngineConfig(MODEL, max_num_batched_tokens=100, device="cuda")


def test_blocks_of_one_kind_of_device_go_into_those_of_the_other() -> None:
    sizes = sorted({one.sizes.block_size for one in (CPU, CUDA, LARGE_CUDA)})
    assert all(large % small == 0 for small in sizes for large in sizes if large >= small)


def test_a_line_says_what_was_chosen_and_why() -> None:
    told = EngineConfig(MODEL, device="cuda:1", device_bytes=80 << 30, mixed_prefill_tokens=256).described()
    assert told.startswith(
        "cuda:1 (80 GiB): blocks of 64 tokens, 512 sequences, 8192 tokens a step, 2048 of one prompt, 256 "
        "beside running answers; the defaults of a CUDA device of 64 GiB or more, where"
    )
    told = EngineConfig(MODEL, block_size=32).described()
    assert told.startswith("cpu: blocks of 32 tokens, 64 sequences, 512 tokens a step, 256 of one prompt, as")
    assert "; block_size as given, else the defaults of a CPU, where" in told


@pytest.mark.parametrize("role", ROLES)
def test_a_worker_is_told_its_devices(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "device_memory", {"cuda:2": 141 << 30, "cpu": 0}.__getitem__)
    for device, default in (("cuda:2", LARGE_CUDA), ("cpu", CPU)):
        worker = WorkerConfig(role=role, device=device)  # type: ignore[arg-type]
        config = start._engine_config(worker, tmp_path, "float32")
        assert config.sizes == default.sizes
        assert config.mixed_prefill_tokens == default.mixed_prefill_tokens(worker.role)
        worker = WorkerConfig(role=role, device=device, mixed_prefill_tokens=9)  # type: ignore[arg-type]
        assert start._engine_config(worker, tmp_path, "float32").mixed_prefill_tokens == 9


def test_help_names_the_defaults_of_each_device() -> None:
    command = typer.main.get_command(commands).commands["up"]  # type: ignore[attr-defined]
    told = {param.name: param.help for param in command.params}
    for field in fields(StepSizes):
        here, there = (getattr(one.sizes, field.name) for one in (CPU, CUDA))
        assert f"Default: {here} on a CPU, {there} on CUDA" in told[field.name]
    assert f"{LARGE_CUDA.sizes.max_num_seqs} if that has 64 GiB" in told["max_num_seqs"]


def test_every_name_of_a_device_has_defaults() -> None:
    assert defaults_of("cpu") is CPU
    assert defaults_of("cuda") is defaults_of("cuda:7") is CUDA
