"""An option stands on a field: commands, checks and the arguments of child processes derive from it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from baton.bench.config import LatencyConfig, ServeConfig
from baton.bench.sweep.config import SearchConfig
from baton.bench.workload.config import WorkloadConfig
from baton.cli.derived import Given, OptionsOf, takes
from baton.nodes.config import NodeConfig
from baton.planner.config import PlannerConfig
from baton.process.fields import Before, Option, check_arguments, check_options, options_of, to_argv
from baton.process.options import ConfigError, check_filled, parse_size
from baton.router.config import RouterConfig
from baton.simulated.config import SimulatedConfig
from baton.worker.config import WorkerConfig

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    speed: Annotated[int, Option("How fast.", "Motion", least=1, most=9)] = 3
    colour: Annotated[Literal["red", "blue"], Option("Which paint.", "Looks")] = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Car(Base):
    plate: Annotated[str, Option("What is on it.", "Looks", check=check_filled)]
    owner: Annotated[str | None, Option("Whose it is.", "Looks"), Before("speed")] = None
    stops: Annotated[tuple[str, ...], Option("Where.", "Motion", flags="--stop")] = ()
    lights: Annotated[bool, Option("On or off.", "Looks")] = True
    horn: Annotated[bool, Option("It has one.", "Looks")] = False
    load: Annotated[int, Option("What it carries.", "Motion", parse=parse_size, metavar="SIZE", least=0)] = 0
    key: Annotated[str, Option("Starts it.", env="CAR_KEY", show_default=False, secret=True)] = ""
    wheels: int = 4

    def __post_init__(self) -> None:
        check_options(self)


def commands(found: list[Car]) -> typer.Typer:
    app = typer.Typer(add_completion=False)

    @app.command()
    @takes("first", OptionsOf(Car, help={"horn": "Loud."}, defaults={"speed": 5}))
    def drive(given: Given, first: int = 1, last: int = 2) -> None:
        assert set(given.values) == {declared.field for declared in options_of(Car)}
        found.append(Car(**given.fields(Car)))

    return app


def driven(*argv: str) -> Car:
    found: list[Car] = []
    result = CliRunner().invoke(commands(found), argv, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def test_a_command_has_the_options_in_the_order_of_help() -> None:
    command = typer.main.get_command(commands([]))
    names = ["first", "owner", "speed", "colour", "plate", "stops", "lights", "horn", "load", "key", "last"]
    assert [param.name for param in command.params] == names
    said = {param.name: param for param in command.params}
    assert said["horn"].help == "Loud." and said["speed"].default == 5  # type: ignore[attr-defined]
    assert said["stops"].opts == ["--stop"] and said["plate"].required
    assert said["lights"].secondary_opts == ["--no-lights"] and not said["horn"].secondary_opts


@pytest.mark.parametrize(
    "car",
    [
        Car(plate="B 1", speed=5),
        Car(plate="B 1", speed=9, colour="blue", owner="me", stops=("a", "b"), horn=True, load=1 << 30),
        Car(plate="B 1", speed=4, lights=False),
    ],
)
def test_a_configuration_survives_its_own_arguments(car: Car) -> None:
    assert driven(*to_argv(car)) == car


def test_arguments_say_what_differs_from_the_defaults_and_no_secret() -> None:
    assert to_argv(Car(plate="B 1", key="hush", wheels=3, stops=("a",), horn=True)) == [
        *("--plate", "B 1", "--stop", "a", "--horn")
    ]


def test_a_size_is_read_and_refused_in_its_own_words() -> None:
    assert driven("--plate", "B 1", "--load", "2KiB").load == 2048
    result = CliRunner().invoke(commands([]), ["--plate", "B 1", "--load", "much"])
    assert result.exit_code == 2 and "'much' is not a size" in result.output


@pytest.mark.parametrize(
    ("wrong", "command_line", "python"),
    [
        (
            {"speed": 0},
            "--speed: must be at least 1, not 0",
            "speed is 0; allowed: .* at least 1, at most 9",
        ),
        (
            {"speed": 10},
            "--speed: must be at most 9, not 10",
            "speed is 10; allowed: .* at least 1, at most 9",
        ),
        (
            {"colour": "tin"},
            "--colour: must be one of red, blue, not 'tin'",
            "colour is 'tin'; allowed: red, blue",
        ),
        ({"load": -1}, "--load: must be at least 0, not -1", "load is -1; allowed: .* at least 0"),
        ({"plate": ""}, "--plate: must not be empty", None),
    ],
)
def test_a_bound_is_told_to_whoever_asks(
    wrong: dict[str, Any], command_line: str, python: str | None
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(command_line)}$"):
        Car(**{"plate": "B 1", **wrong})
    car = Car(plate="B 1")
    for name, value in wrong.items():
        object.__setattr__(car, name, value)
    if python is not None:
        with pytest.raises(ValueError, match=f"^{python}$"):
            check_arguments(car)


def test_none_is_refused_where_nothing_is_left_open() -> None:
    assert Car(plate="a", owner=None).owner is None
    with pytest.raises(ConfigError, match="--colour: must be one of red, blue, not 'None'"):
        Car(plate="a", colour=None)  # type: ignore[arg-type]
    open_ = Base(colour=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="colour is None; allowed: red, blue"):
        check_arguments(open_)


def test_a_number_that_is_not_whole_is_refused_from_python() -> None:
    car = Car(plate="B 1", speed=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^speed is 2.5; allowed: a whole number"):
        check_arguments(car)


NO_OPTIONS: dict[Any, set[str]] = {
    WorkerConfig: {"role"},
    RouterConfig: set(),
    PlannerConfig: set(),
    NodeConfig: set(),
    SimulatedConfig: {"worker", "profile", "faults"},
    ServeConfig: {"workload", "goals"},
    WorkloadConfig: set(),
    LatencyConfig: set(),
    SearchConfig: set(),
}


@pytest.mark.parametrize("config", NO_OPTIONS)
def test_every_field_is_an_option(config: Any) -> None:
    """But those that a command makes of something else."""
    names = {declared.field for declared in options_of(config)}
    assert {field.name for field in fields(config)} - names == NO_OPTIONS[config]


def test_secrets_are_in_no_arguments() -> None:
    secrets = {
        (config, declared.field)
        for config in NO_OPTIONS
        for declared in options_of(config)
        if "key" in declared.field.split("_") and declared.default is not MISSING
    }
    assert {(WorkerConfig, "cluster_key"), (RouterConfig, "cluster_key"), (ServeConfig, "api_key")} <= secrets
    for config, name in secrets:
        [declared] = [one for one in options_of(config) if one.field == name]
        assert declared.option.secret and declared.option.env and not declared.option.show_default


def test_the_schema_of_the_chart_is_what_the_options_say() -> None:
    """It is written by scripts.chart_options."""
    subprocess.run(
        [sys.executable, "-m", "scripts.chart_options", "--check"], check=True, cwd=ROOT, timeout=60
    )


def test_the_chart_knows_what_can_be_switched_off() -> None:
    """It writes `false` as --no-x for these, and leaves every other option out."""
    template = (ROOT / "helm/baton/templates/_options.tpl").read_text(encoding="utf-8")
    [listed] = re.findall(r"has \$name \(list ([^)]*)\)", template)
    known = {
        re.sub(r"_(.)", lambda found: found[1].upper(), declared.field)
        for config in (WorkerConfig, RouterConfig, PlannerConfig)
        for declared in options_of(config)
        if declared.type is bool and (declared.flags is None or "/" in declared.flags)
    }
    assert set(re.findall(r'"(\w+)"', listed)) == known
