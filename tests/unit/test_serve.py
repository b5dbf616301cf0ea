"""``baton serve``: what it starts, what it lends its processes meanwhile, and what is mistyped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from baton.cli.main import commands
from baton.cli.mistyped import message_of
from baton.cli.ring import RingPlan
from baton.cli.up import UpOptions
from baton.hub import resolve_model
from baton.process.options import ConfigError
from baton.router.security.keys import parse
from baton.router.shared.limits import Limits
from baton.text.tokenizer import Tokenizer

Look = Callable[[RingPlan], None]


def started(monkeypatch: pytest.MonkeyPatch, *argv: str, look: Look = lambda ring: None) -> RingPlan:
    """The ring that `baton serve` would run. ``look`` is called while it would."""
    rings: list[RingPlan] = []

    def up(ring: RingPlan, options: UpOptions) -> int:
        rings.append(ring)
        look(ring)
        return 0

    monkeypatch.setattr("baton.cli.up.up", up)
    assert commands(["serve", *argv, "--port", "0", "--grpc-port", "-1"], standalone_mode=False) == 0
    (ring,) = rings
    return ring


def test_it_starts_what_up_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = started(monkeypatch, "demo", "--max-num-seqs", "8", "-tp", "2", "--num-gpu-blocks-override=64")
    assert [worker.role for worker in ring.workers.values()] == ["prefill", "decode"]
    for worker in ring.workers.values():
        assert (worker.model, worker.max_num_seqs, worker.tensor_parallel_size) == ("demo", 8, 2)
        assert worker.engine_settings()["num_blocks"] == 64
    assert ring.router.model_names == ("demo",)
    assert ring.router.api_keys is None
    assert [spec.name for spec in ring.specs()] == ["prefill", "decode", "router"]


def test_roles_and_memory_are_a_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = started(monkeypatch, "demo", "--both", "2", "--gpu-memory-utilization", "0.4")
    assert [worker.role for worker in ring.workers.values()] == ["both", "both"]
    settings = [worker.engine_settings() for worker in ring.workers.values()]
    assert [each["device_memory_fraction"] for each in settings] == [0.4, 0.4]


def test_a_key_reaches_the_router_as_its_digest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(ring: RingPlan) -> None:
        assert ring.router.api_keys is not None
        content = Path(ring.router.api_keys).read_bytes()
        assert b"open sesame" not in content
        keys = parse(content, Limits())
        client = keys.find("open sesame")
        assert client is not None and client.operator
        assert keys.find("another") is not None and keys.find("a third") is None
        assert not any("sesame" in part for spec in ring.specs() for part in spec.argv)

    ring = started(monkeypatch, "demo", "--api-key", "open sesame", "another", look=look)
    assert ring.router.api_keys is not None and not Path(ring.router.api_keys).exists()
    with pytest.raises(ConfigError, match="--api-key: cannot be given together with --api-keys"):
        started(monkeypatch, "demo", "--api-key", "a", "--api-keys", "keys.yaml")
    with pytest.raises(ConfigError, match="--api-key: the same key is given twice"):
        started(monkeypatch, "demo", "--api-key", "a", "a")


def test_the_router_alone_has_another_chat_template(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def look(ring: RingPlan) -> None:
        assert {worker.model for worker in ring.workers.values()} == {"demo"}
        assert ring.router.model_names == ("demo",)
        ours, theirs = Tokenizer.from_dir(ring.router.model), Tokenizer.from_dir(resolve_model("demo"))
        assert ours.encode("A KV block") == theirs.encode("A KV block")
        assert ours.chat_template is not None
        assert ours.chat_template.render([{"role": "user", "content": "x"}]) == "one: x"

    text = "{% for m in messages %}one: {{ m.content }}{% endfor %}"
    file = tmp_path / "chat.jinja"
    file.write_text(text)
    for template in (text, str(file)):
        ring = started(monkeypatch, "demo", "--chat-template", template, look=look)
        assert not Path(ring.router.model).exists()
    with pytest.raises(ConfigError, match=r"--chat-template: cannot read no\.jinja: .*No such file"):
        started(monkeypatch, "demo", "--chat-template", "no.jinja")


def said_to(*argv: str) -> str:
    """The one line that is answered to a command line that cannot be parsed."""
    with pytest.raises(typer.TyperException) as error:
        commands(list(argv), standalone_mode=False)
    assert error.value.exit_code == 2
    return message_of(error.value)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("serve x --max-num-seq 3", "--max-num-seq: no such option; did you mean --max-num-seqs?"),
        ("serve x --enable-prefix-cachin", "--enable-prefix-cachin: no such option; did you mean "),
        ("up --prefil 2", "--prefil: no such option; did you mean --prefill?"),
        ("up --no-prefix-cachin", "--no-prefix-cachin: no such option; did you mean --no-prefix-caching?"),
        ("router --workers a:1", "--workers: no such option; did you mean --worker?"),
        ("decode --data-prt 1", "--data-prt: no such option; did you mean --data-port?"),
        ("generate hi --temprature 1", "--temprature: no such option; did you mean --temperature?"),
        ("bench serve --godput ttft:1", "--godput: no such option; did you mean --goodput?"),
        ("keys create --tenants a", "--tenants: no such option; did you mean --tenant?"),
        ("models --xyz", "--xyz: no such option; see "),
        ("serv demo", "No such command 'serv'. Did you mean 'serve'?"),
        ("bench sweeep", "No such command 'sweeep'. Did you mean 'sweep'?"),
    ],
)
def test_what_was_meant_is_suggested(argv: str, line: str) -> None:
    said = said_to(*argv.split())
    assert said.startswith(line)
    assert "\n" not in said


def test_errors_of_other_kinds_are_told_as_typer_tells_them() -> None:
    class NoSuchOption(typer.TyperException):
        """One that does not name the option."""

    class BadOptionUsage(typer.TyperException):
        """One that names an option which is known."""

        option_name = "--prefill"
        ctx = typer.Context(typer.main.get_command(commands))

    assert message_of(NoSuchOption("No such option: -x")) == "No such option: -x"
    assert message_of(BadOptionUsage("--prefill needs a number")) == "--prefill needs a number"
    assert said_to("up", "--prefill") == "Option '--prefill' requires an argument."


def completed(*typed: str) -> list[str]:
    """What bash is offered for the last of ``typed``."""
    environment = {
        "_BATON_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("baton", *typed)),
        "COMP_CWORD": str(len(typed)),
    }
    return CliRunner().invoke(commands, [], env=environment, prog_name="baton").stdout.split()


def test_shells_complete_commands_options_and_values() -> None:
    assert completed("swit") == ["switch-role"]
    assert completed("switch-role", "a:1", "d") == ["decode"]
    assert sorted(completed("up", "--connector", "n")) == ["nccl", "nixl"]
    assert {"demo", "Qwen/Qwen3-8B"} <= set(completed("serve", ""))
    assert completed("serve", "demo", "--enable-prefix") == ["--enable-prefix-caching"]


def test_shells_are_given_their_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typer.completion, "_get_shell_name", lambda: "bash")  # tests need have no shell
    result = CliRunner().invoke(commands, ["--show-completion"], prog_name="baton")
    assert result.exit_code == 0, result.output
    assert "complete -o default -F _baton_completion baton" in result.stdout
