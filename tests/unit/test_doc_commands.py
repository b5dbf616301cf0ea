"""Every command of the documentation is one that exists, and is run by a test or says what it needs.

Options are parsed by the programs' own parsers. What is quick is run here; for the rest `ELSEWHERE` names the
test that runs it, or what the machine of the tests lacks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import msgspec
import pytest
import typer.main
from typer.core import TyperCommand, TyperGroup
from typer.testing import CliRunner

from baton.cli.main import commands as baton
from baton.router.api.http.openai.schemas import ChatRequest, CompletionRequest
from scripts.reference.values import CHART, Schema, values
from tests.support.doc_commands import PAGES, ROOT, Command, commands
from tests.support.tiny_runs import PACKAGES, RUNS, named_programs

COMMANDS = list(commands())
QUICK = ("baton keys create",)
"""What is run as it stands."""

ELSEWHERE: Mapping[str, str] = {
    "make run": "tests/e2e/test_openai_client.py asks the ring that it starts the same question",
    "make test": "CI is this",
    "make test-deep": "CI is this",
    "make lint": "CI is this",
    "make docs": "needs mkdocs; tests/unit/test_site.py tries its parts",
    "make gpu": "needs a CUDA device; tests/e2e/test_gpu_dry_run.py runs it without",
    ".ci/run": "CI is this",
    "curl": "tests/e2e/test_openai_client.py sends such bodies; here they are read as the router does",
    "baton up": "tests/support/ring.py starts its processes; tests/unit/test_cli_up.py runs it",
    "baton serve": "tests/e2e/test_baton_serve.py starts it",
    "baton top": "tests/e2e/test_top.py runs it",
    "baton models": "tests/unit/test_model_check.py runs what it does",
    "baton prefill": "tests/support/ring.py starts it",
    "baton decode": "tests/support/ring.py starts it",
    "baton both": "tests/support/ring.py starts it",
    "baton router": "tests/support/ring.py starts it",
    "baton node": "tests/e2e/test_ring_nodes.py starts it",
    "baton worker-sim": "tests/e2e/test_simulated_ring.py starts it",
    "baton planner": "tests/e2e/test_planner_ring.py starts it",
    "baton bench": "tests/e2e/test_bench.py runs it, for less long",
    "baton generate": "tests/unit/test_cli_client.py runs what it does",
    "baton explain": "tests/e2e/test_ring_traces.py runs it",
    "baton switch-role": "tests/e2e/test_role_switches.py does what it does",
    "python -m pytest": "takes minutes or hours: what a test does deeper than in CI",
    "python -m scripts": "tests/e2e/test_programs.py runs it, where others' files or servers are not needed",
    "python -m tests": "tests/e2e/test_programs.py runs it",
    "python -m loadtest": "tests/e2e/test_programs.py runs it, for less long",
    "pip": "needs an index of packages; the extra exists",
    "pipx": "needs an index of packages; `python -m scripts.fresh_installs` runs it",
    "python -m build": "needs an index of packages; tests/unit/test_wheel.py builds the wheel",
    "python scripts/from_vllm/listing.py": "needs vLLM; tests/unit/test_vllm_options.py reads what it wrote",
    "scripts/release": "takes minutes; tests/unit/test_release.py tries its parts",
    "ulimit": "a limit of the shell",
    "docker": "needs a daemon",
    "helm": "needs a cluster; tests/unit/test_chart_releases.py runs Helm before a fake one",
    "kubectl": "needs a cluster",
    "git": "makes a tree of an earlier commit, to compare with",
    "scripts/router-peers": "needs an index of packages, and minutes",
    "scripts/gpu-bundle": "tests/unit/test_gpu_bundle.py makes the bundle",
    "tar": "unpacks that bundle",
    "run.sh": "runs that bundle on a machine with a GPU",
    "export": "a variable of the shell",
}
"""What a command begins with → who runs it, or what it needs."""

STAND_FOR = {"MODEL": "gemma3", "CONNECTOR": "tcp", "BEFORE": str(ROOT), "../before": str(ROOT)}
"""Words in place of which a reader puts one of several choices, or a tree of an earlier commit."""


class Parsed(Exception):  # noqa: N818 - it is no error
    """Raised once arguments are parsed, before anything is done with them."""


def beginning(command: Command) -> str:
    """What `QUICK` and `ELSEWHERE` know a command by."""
    words = command.words
    if words[0] == "python" and words[1] != "-m":
        return " ".join(words)
    if words[0] == "python":
        return f"python -m {words[2].partition('.')[0]}"
    if words[:3] == ("baton", "keys", "create"):
        return "baton keys create"
    return " ".join(words[: 2 if words[0] in ("baton", "make") else 1])


def is_left_out(words: Sequence[str], at: int) -> bool:
    """Whether a word stands for further arguments, and not for the value of an option."""
    return words[at] in ("...", "…") and not words[at - 1].startswith("--")


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_the_command_exists_and_takes_its_arguments(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert beginning(command) in (*QUICK, *ELSEWHERE), f"{command}: who runs it, or what does it need?"
    check = CHECKS.get(command.words[0])
    if check is not None:
        said = (word for at, word in enumerate(command.words) if at and not is_left_out(command.words, at))
        check([STAND_FOR.get(word, word) for word in said], monkeypatch)


def test_what_is_quick_runs() -> None:
    ran = [command for command in COMMANDS if beginning(command) in QUICK]
    for command in ran:
        result = CliRunner().invoke(baton, list(command.words[1:]))
        assert result.exit_code == 0, f"{command}: {result.output}"
    assert {beginning(command) for command in ran} == set(QUICK)


def test_whoever_runs_the_others_is_there() -> None:
    known = {beginning(command) for command in COMMANDS}
    assert set(ELSEWHERE) - known == set(), "no page has these any more"
    for how in ELSEWHERE.values():
        for path in re.findall(r"tests/[\w/]+\.py", how):
            assert (ROOT / path).is_file(), path


def test_every_run_says_how_to_repeat_it() -> None:
    runs = {page for page in PAGES if page.parent.name == "benchmarks"}
    assert {page.name for page in runs - {command.page for command in COMMANDS}} == set()


def test_targets_within_sentences_exist() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets()


def check_baton(words: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    command, names = typer.main.get_command(baton), list(words)
    while isinstance(command, TyperGroup):
        command = command.commands[names.pop(0)]
    assert isinstance(command, TyperCommand)
    command.make_context("baton", names)


def check_python(words: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    if words[0] != "-m":
        assert (ROOT / words[0]).is_file()
        return
    _, module, *arguments = words
    if module == "pytest":
        assert all((ROOT / path).exists() for path in arguments if not path.startswith("-"))
        return
    if module.partition(".")[0] not in PACKAGES:  # of others
        return
    if "--help" in arguments:
        arguments.remove("--help")
    package = ROOT / module.replace(".", "/")
    path = package / "__main__.py" if package.is_dir() else package.with_suffix(".py")
    if "parse_args" not in path.read_text():
        assert not arguments, f"{module} takes no arguments"
        return

    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, args: Sequence[str] | None = None) -> None:
        parse(self, args)
        raise Parsed

    patch.setattr(argparse.ArgumentParser, "parse_args", stop)
    patch.setattr(sys, "argv", [module, *arguments])
    loaded = importlib.import_module(f"{module}.__main__" if package.is_dir() else module)
    with pytest.raises(Parsed):
        loaded.main()


def targets() -> set[str]:
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    return set(phony[1].split())


def check_make(words: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    assert words[0] in targets()
    assert all(re.match(r"(ARGS|PROMPT|PYTHON)=", word) for word in words[1:])


def check_curl(words: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    url = next(word for word in words if re.match(r"(http://)?(127\.0\.0\.1|localhost):8000/", word))
    body = words[words.index("-d") + 1]
    kind = ChatRequest if url.endswith("/v1/chat/completions") else CompletionRequest
    assert kind is ChatRequest or url.endswith("/v1/completions")
    json.loads(body)
    msgspec.json.decode(body, type=kind)


def check_helm(words: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    schema: Schema = json.loads((CHART / "values.schema.json").read_text())
    known = {value.path for value in values(schema)}
    for flag, value in pairwise(words):
        if flag == "-f" and value != "values.yaml":
            assert (ROOT / value).is_file(), value
        if flag == "--set":
            assert value.partition("=")[0] in known, value
    assert words[0] in ("install", "upgrade", "test", "--set")


def check_docker(words: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    file = ROOT / words[words.index("-f") + 1]
    for argument in re.findall(r"--build-arg (\w+)=", " ".join(words)):
        assert f"ARG {argument}" in file.read_text(), argument


def check_pip(words: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for wanted in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert set(wanted.split(",")) <= set(extras), wanted


CHECKS: Mapping[str, Callable[[Sequence[str], pytest.MonkeyPatch], None]] = {
    "baton": check_baton,
    "python": check_python,
    "make": check_make,
    "curl": check_curl,
    "helm": check_helm,
    "docker": check_docker,
    "pip": check_pip,
}


def test_every_program_that_is_named_is_run() -> None:
    """By tests/e2e/test_programs.py."""
    named = set(named_programs())
    assert named == set(RUNS), f"not run: {named - set(RUNS)}; in no page: {set(RUNS) - named}"
