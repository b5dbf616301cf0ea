"""Every option of ``vllm serve`` has a row: taken as the right setting of Baton's, or refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import typer

from baton.cli.main import commands
from baton.cli.ring_options import RingOptions
from baton.cli.vllm.option import VllmOption
from baton.cli.vllm.refused import EARLIER
from baton.cli.vllm.table import BY_NAME, OPTIONS, VERSION
from baton.cli.vllm.translating import translate
from baton.process.fields import options_of
from baton.process.options import ConfigError
from baton.router.config import RouterConfig
from baton.worker.config import WorkerConfig

ROOT = Path(__file__).parents[2]
LISTING = json.loads((ROOT / "scripts/from_vllm/vllm.json").read_text())
SERVE = typer.main.get_command(commands).commands["serve"]  # type: ignore[attr-defined]  # it is a group

OWN = {"model", "revision", "chat_template", "api_key"}
"""What `baton serve` itself takes."""

Case = tuple[Sequence[str], Mapping[str, object]]

NOTHING: Mapping[str, object] = {}
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}'

CASES: Mapping[str, Sequence[Case]] = {
    "--allow-credentials": [(["--allow-credentials"], {"allow_credentials": True})],
    "--allowed-headers": [(['["x-a", "x-b"]'], {"allowed_headers": ["x-a", "x-b"]})],
    "--allowed-methods": [(['["GET"]'], {"allowed_methods": ["GET"]})],
    "--allowed-origins": [
        (['["*"]'], {"allowed_origins": ["*"]}),
        (["a.org"], {"allowed_origins": ["a.org"]}),
    ],
    "--api-key": [(["one", "two"], {"api_key": ["one", "two"]})],
    "--api-server-count": [(["2"], {"processes": 2})],
    "--async-scheduling": [
        (["--async-scheduling"], {"async_scheduling": "on"}),
        (["--no-async-scheduling"], {"async_scheduling": "off"}),
        (["--async-scheduling", "auto"], {"async_scheduling": "auto"}),
    ],
    "--block-size": [(["32"], {"block_size": 32})],
    "--chat-template": [(["a.jinja"], {"chat_template": "a.jinja"})],
    "--chat-template-content-format": [(["auto"], NOTHING)],
    "--config-format": [(["hf"], NOTHING)],
    "--convert": [(["none"], NOTHING)],
    "--device-ids": [(["0,3"], {"device": "cuda:0,cuda:3"})],
    "--disable-fastapi-docs": [(["--disable-fastapi-docs"], NOTHING)],
    "--enable-server-load-tracking": [(["--enable-server-load-tracking"], NOTHING)],
    "--disable-log-stats": [(["--disable-log-stats"], NOTHING)],
    "--disable-uvicorn-access-log": [(["--disable-uvicorn-access-log"], NOTHING)],
    "--distributed-executor-backend": [(["mp"], NOTHING)],
    "--dtype": [(["half"], {"dtype": "float16"}), (["bfloat16"], {"dtype": "bfloat16"})],
    "--enable-auto-tool-choice": [(["--enable-auto-tool-choice"], NOTHING)],
    "--exclude-tools-when-tool-choice-none": [(["--exclude-tools-when-tool-choice-none"], NOTHING)],
    "--enable-chunked-prefill": [
        (["--enable-chunked-prefill"], {"chunked_prefill": True}),
        (["--no-enable-chunked-prefill"], {"chunked_prefill": False}),
    ],
    "--enable-prefix-caching": [
        (["--enable-prefix-caching"], {"prefix_caching": True}),
        (["--no-enable-prefix-caching"], {"prefix_caching": False}),
    ],
    "--enable-prompt-tokens-details": [(["--enable-prompt-tokens-details"], NOTHING)],
    "--enable-request-id-headers": [(["--enable-request-id-headers"], NOTHING)],
    "--enable-ssl-refresh": [(["--enable-ssl-refresh"], NOTHING)],
    "--enforce-eager": [
        (["--enforce-eager"], {"enforce_eager": True}),
        (["--no-enforce-eager"], {"enforce_eager": False}),
    ],
    "--generation-config": [
        (["vllm"], {"generation_config": "none"}),
        (["auto"], {"generation_config": "auto"}),
    ],
    "--gpu-memory-utilization": [(["0.8"], {"gpu_memory_utilization": 0.8})],
    "--grpc-port": [(["9001"], {"grpc_port": 9001})],
    "--host": [(["0.0.0.0"], {"host": "0.0.0.0"})],
    "--kv-cache-dtype": [
        (["fp8"], {"kv_cache_dtype": "fp8"}),
        (["fp8_e4m3"], {"kv_cache_dtype": "fp8"}),
    ],
    "--kv-cache-memory-bytes": [(["2G"], {"kv_cache_memory": 2 << 30}), (["1g"], {"kv_cache_memory": 10**9})],
    "--kv-offloading-backend": [(["native"], NOTHING)],
    "--kv-offloading-size": [(["1.5"], {"host_kv_memory": 3 << 29})],
    "--language-model-only": [(["--language-model-only"], NOTHING)],
    "--linear-backend": [(["auto"], NOTHING)],
    "--load-format": [(["safetensors"], {"load_format": "auto"}), (["dummy"], {"load_format": "dummy"})],
    "--log-level": [(["CRITICAL"], {"log_level": "error"}), (["INFO"], {"log_level": "info"})],
    "--logprobs-mode": [(["raw_logprobs"], NOTHING)],
    "--long-prefill-token-threshold": [(["128"], {"prefill_chunk": 128}), (["0"], {"prefill_chunk": None})],
    "--mamba-cache-dtype": [(["auto"], NOTHING)],
    "--max-logprobs": [(["20"], NOTHING)],
    "--max-model-len": [
        (["25.6k"], {"max_model_len": 25600}),
        (["1K"], {"max_model_len": 1024}),
        (["auto"], {"max_model_len": None}),
        (["-1"], {"max_model_len": None}),
    ],
    "--max-num-batched-tokens": [(["8k"], {"max_num_batched_tokens": 8000})],
    "--max-num-queued-reqs": [(["9"], {"queue_size": 9})],
    "--max-num-queued-tokens": [(["1K"], {"queue_tokens": 1024})],
    "--max-num-seqs": [(["64"], {"max_num_seqs": 64})],
    "--model": [(["models/x"], {"model": "models/x"})],
    "--model-impl": [(["auto"], NOTHING)],
    "--moe-backend": [(["auto"], NOTHING)],
    "--num-gpu-blocks-override": [(["100"], {"num_blocks": 100})],
    "--otlp-traces-endpoint": [(["http://c:4317"], {"otlp_endpoint": "http://c:4317"})],
    "--pipeline-parallel-size": [(["2"], {"pipeline_parallel_size": 2})],
    "--port": [(["9000"], {"port": 9000})],
    "--quantization": [(["int8"], {"quantization": "int8"})],
    "--reasoning-parser": [
        (["qwen3"], {"reasoning_parser": "think"}),
        (["deepseek_r1"], {"reasoning_parser": "deepseek_r1"}),
        ([""], {"reasoning_parser": "auto"}),
    ],
    "--response-role": [(["assistant"], NOTHING)],
    "--revision": [(["v2"], {"revision": "v2"})],
    "--runner": [(["generate"], NOTHING)],
    "--scheduling-policy": [(["priority"], {"scheduling_policy": "priority"})],
    "--served-model-name": [(["a", "b"], {"served_model_name": ["a", "b"]})],
    "--spec-method": [(["draft_model"], {"speculative_method": "draft"})],
    "--spec-model": [(["models/d"], {"speculative_model": "models/d"})],
    "--spec-tokens": [(["5"], {"num_speculative_tokens": 5})],
    "--speculative-config": [
        (
            [SPECULATION],
            {"speculative_method": "ngram", "num_speculative_tokens": 3, "speculative_ngram_max": 5},
        ),
        (
            ['{"method": "draft_model", "model": "d"}'],
            {"speculative_method": "draft", "speculative_model": "d"},
        ),
    ],
    "--ssl-cert-reqs": [(["0"], NOTHING)],
    "--ssl-certfile": [(["c.pem"], {"ssl_certfile": "c.pem"})],
    "--ssl-keyfile": [(["k.pem"], {"ssl_keyfile": "k.pem"})],
    "--stream-interval": [(["1"], NOTHING)],
    "--tensor-parallel-size": [(["2"], {"tensor_parallel_size": 2})],
    "--tokenizer-mode": [(["hf"], NOTHING)],
    "--tool-call-parser": [
        (["hermes"], {"tool_call_parser": "hermes"}),
        ([""], {"tool_call_parser": "auto"}),
    ],
    "--trust-remote-code": [(["--trust-remote-code"], NOTHING), (["--no-trust-remote-code"], NOTHING)],
    "--use-tqdm-on-load": [(["--use-tqdm-on-load"], NOTHING)],
    "--uvicorn-log-level": [(["trace"], {"log_level": "debug"})],
}
"""Each option that is taken: its values, or the switch as typed, and the settings that differ then."""

TAKEN = [option for option in OPTIONS if option.verdict != "refused"]
REFUSED = [option for option in (*OPTIONS, *EARLIER) if option.verdict == "refused"]


def settings(*argv: str) -> dict[str, object]:
    """What `baton serve` makes of a command line. No process is started."""
    context = SERVE.make_context("serve", list(argv))
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in context.params.items()
        if not name.startswith("vllm_")
    }


def spelled(option: VllmOption, values: Sequence[str]) -> Iterator[list[str]]:
    """The command line by every spelling of the option, by underscores, and with ``=``."""
    if option.arity == "none":
        yield list(values)
        return
    for name in option.names:
        yield [name, *values]
    yield ["--" + option.name[2:].replace("-", "_"), *values]
    if len(values) == 1:
        yield [f"{option.name}={values[0]}"]


def test_the_table_has_every_option_of_that_release() -> None:
    assert LISTING["vllm"] == VERSION
    listed = {
        tuple(name for name in option["names"] if not name.startswith("--no-")): option["values"]
        for option in LISTING["options"]
    }
    rows = {option.names: option.arity for option in OPTIONS}
    assert set(rows) == set(listed)
    assert len(rows) == len(OPTIONS) == len(LISTING["options"])
    assert {names: arity for names, arity in rows.items() if BY_NAME[names[0]].verdict != "refused"} == {
        option.names: listed[option.names] for option in TAKEN
    }
    assert not {name for option in EARLIER for name in option.names} & {names[0] for names in listed}


def test_every_row_that_is_taken_has_its_case() -> None:
    assert set(CASES) == {option.name for option in TAKEN}


@pytest.mark.parametrize("option", TAKEN, ids=lambda option: option.name)
def test_what_is_taken_becomes_the_right_setting(
    option: VllmOption, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if option.name == "--model" else ["demo"]
    plain = settings("demo")
    known = {
        each.field for config in (WorkerConfig, RouterConfig, RingOptions) for each in options_of(config)
    }
    for values, expected in CASES[option.name]:
        assert set(expected) <= known | OWN
        for argv in spelled(option, values):
            assert settings(*model, *argv) == {**plain, **expected}
            told = capsys.readouterr().err
            assert told == (f"note: {option.name}: {option.why}\n" if option.verdict == "different" else "")


@pytest.mark.parametrize("option", TAKEN, ids=lambda option: option.name)
def test_rows_say_whose_option_it_is(option: VllmOption) -> None:
    if option.verdict == "same":
        assert option.baton == option.name
    if option.verdict == "different":
        assert option.why
    if option.verdict == "taken" and option.baton in ("", option.name):
        assert option.why or option.arity == "none"


@pytest.mark.parametrize("name", [name for option in REFUSED for name in option.names])
def test_what_is_refused_says_why_in_a_line(name: str) -> None:
    option = BY_NAME[name]
    for typed in ([name, "1"], [f"{name}=1"], [name]):
        with pytest.raises(ConfigError) as refused:
            settings("demo", *typed)
        assert str(refused.value).startswith(f"{option.name}: no such option in Baton. {option.why}")
        assert option.baton in str(refused.value)
        assert "\n" not in str(refused.value)


def test_the_command_line_ends_with_2() -> None:
    def serve(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "baton", "serve", "demo", *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=240)

    refused = serve("--enable-lora")
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: --enable-lora: no such option in Baton. Adapters are not served: merge them into the "
        "checkpoint.\n"
    )
    assert refused.stdout == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--no-enable-lora"], "--enable-lora: no such option in Baton."),
        (["--compilation-config.mode", "3"], "--compilation-config: no such option in Baton."),
        (["--runner", "pooling"], "--runner: must be auto or generate, not 'pooling': Baton generates text"),
        (["--no-enable-auto-tool-choice"], "--no-enable-auto-tool-choice: say `--tool-call-parser none`."),
        (["--max-model-len", "long"], "--max-model-len: 'long' is no number; write it like 8192, 8k (8000)"),
        (["--max-num-seqs"], "--max-num-seqs: needs a value"),
        (["--trust-remote-code=yes"], "--trust-remote-code: takes no value, and was given 'yes'"),
        (["--device-ids", "GPU-1"], "--device-ids: must be numbers of CUDA devices, as in 0,1, not 'GPU-1'"),
        (["--kv-offloading-size", "x"], "--kv-offloading-size: 'x' is no number of GiB"),
        (["--speculative-config", "ngram"], "--speculative-config: 'ngram' is not JSON"),
        (["--speculative-config", "[]"], "--speculative-config: must be an object"),
        (
            ["--speculative-config", '{"quantization": "fp8"}'],
            "--speculative-config: quantization: no such key",
        ),
        (["--allowed-origins", "[1]"], "--allowed-origins: must be a list of texts"),
    ],
)
def test_values_that_cannot_be_taken_are_one_line(argv: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        translate(argv)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_keys_may_stand_behind_a_dot() -> None:
    keyed = ["--speculative-config.method", "ngram", "-sc.num_speculative_tokens=3"]
    assert translate(keyed).argv == ["--speculative-method", "ngram", "--num-speculative-tokens", "3"]


def test_options_of_its_own_pass_as_they_are() -> None:
    own = ["--prefill", "2", "--no-prefill", "queue", "--no-ui", "--connector=tcp", "--", "--enable-lora"]
    assert translate(own).argv == own
    assert settings("demo", "--prefill", "2", "--async-scheduling", "off")["async_scheduling"] == "off"


def test_the_page_is_not_behind_the_code() -> None:
    subprocess.run([sys.executable, "-m", "scripts.from_vllm", "--check"], check=True, cwd=ROOT, timeout=240)
