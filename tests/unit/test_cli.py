"""The command line itself: help, errors of one line, exit codes, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton import __version__
from baton.models.registry import FAMILIES, UNSERVED
from tests.support.deep import all_deep_but


def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "baton", *arguments], capture_output=True, text=True, timeout=240
    )


COMMANDS = (
    *("up", "serve", "prefill", "decode", "both", "router", "generate", "models", "doctor", "top", "version"),
    *("bench", "bench latency", "bench throughput", "bench serve", "bench sweep"),
)


@pytest.mark.deep
@pytest.mark.parametrize("command", all_deep_but(("up", "router", "bench serve"), COMMANDS))
def test_every_command_has_help(command: str) -> None:
    result = baton(*command.split(), "--help")
    assert result.returncode == 0
    assert len(result.stdout) > 100
    assert not result.stderr


def test_no_command_shows_the_help() -> None:
    result = baton()
    assert result.returncode == 2
    assert "generate" in result.stdout + result.stderr
    assert "error" not in result.stderr


def test_version() -> None:
    told = baton("version").stdout
    assert told.startswith(f"baton {__version__} ")
    assert baton("--version").stdout == told


@pytest.mark.parametrize(
    ("arguments", "message"),
    all_deep_but(
        2,
        [
            (
                ["decode", "--dtype", "int8"],
                "--dtype: must be one of auto, float32",
            ),
            (["decode", "--port", "x"], "Invalid value for '--port'"),
            (["prefill", "--kv-cache-memory", "much"], "'much' is not a size; write it like 2GiB"),
            (
                ["both", "--quantization", "int4"],
                "--quantization: must be one of auto, none, int8, fp8, not 'int4'",
            ),
            (["router"], "--worker: name at least one, as host:port"),
            (
                ["router", "--worker", "here"],
                "--worker: 'here' is not an address; write it like 10.0.0.7:9000",
            ),
            (["up", "--prefill", "0"], "--prefill: a ring needs a prefill and a decode worker"),
            (["up", "--log-level", "loud"], "--log-level: must be one of"),
            (["up", "--block-size", "0"], "--block-size: must be at least 1, not 0"),
            (["runn"], "No such command"),
            (["bench", "serve", "--goodput", "speed:1"], "--goodput: 'speed:1' is no goal; allowed: ttft:MS"),
            (["bench", "serve", "--request-rate", "0"], "--request-rate: must be above 0, or inf, not 0"),
            (["bench", "serve", "--plot", "a.pdf"], "--plot: must end in .svg or .png, not 'a.pdf'"),
            (["bench", "serve", "--json", "/nowhere/a"], "--json: /nowhere/a is no file in a directory"),
            (["bench", "latency", "--batch-size", "0"], "--batch-size: must be at least 1, not 0"),
            (["bench", "sweep"], "--goodput: is needed: say what a good answer is"),
        ],
    ),
)
def test_a_bad_value_is_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    result = baton(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.deep
def test_kernels_that_cannot_be_had_are_one_line_and_exit_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "BATON_CPU_KERNELS": "native",
        "BATON_CACHE_DIR": str(tmp_path),
        "CXX": "no-such-compiler",
        "BATON_CLUSTER_KEY": "a cluster key of tests",
    }.items():
        monkeypatch.setenv(name, value)
    result = baton("decode", "--device", "cpu", "--port", "0")
    assert result.returncode == 1
    assert result.stderr.startswith("error: BATON_CPU_KERNELS is native, but the kernels cannot be built: ")
    assert result.stderr.count("\n") == 1


def test_generate_without_a_ring() -> None:
    result = baton("generate", "hello", "--url", "http://127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr == "error: nothing listens on http://127.0.0.1:1; start a ring with `baton up`\n"


def test_models_are_listed() -> None:
    told = json.loads(baton("models", "--json").stdout)
    assert set(told["served"]) == set(FAMILIES)
    assert told["served"]["GptOssForCausalLM"]["checkpoints"] == ["unsloth/gpt-oss-20b-BF16"]
    assert told["refused"] == dict(UNSERVED)
    shown = baton("models").stdout
    assert all(name in shown for name in (*FAMILIES, *UNSERVED))
