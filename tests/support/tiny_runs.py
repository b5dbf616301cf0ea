"""How the programs that the documentation names are run in moments, to see that they still do.

Each is given less to do than it is for: what it prints is no measurement.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tests.support.doc_commands import commands

PACKAGES = ("loadtest", "scripts", "tests")


@dataclass(frozen=True)
class TinyRun:
    """``arguments``: of the program; ``{scratch}`` is an empty folder, ``{tree}`` the source tree."""

    arguments: str = ""
    says: str = ""
    """A pattern of what it prints, if it need not end well here."""
    lacks: str = ""
    """What it does not have here, so that it must refuse, and say so."""
    judges: bool = False
    """Whether its status tells if bounds were kept, which so little does not show."""


NO_INDEX: Mapping[str, str] = MappingProxyType(
    {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
)
"""Environment variables without which some would download packages for minutes, or find them in a folder."""
NO_PACKAGE = "No matching distribution|ResolutionImpossible"
"""What pip says where it finds no package, or none of the version that constraints ask for."""

RUNS: Mapping[str, TinyRun] = MappingProxyType(
    {
        "loadtest.chaos": TinyRun("--connector tcp --rounds 2 --clients 3 --logs {scratch}"),
        "loadtest.connectors": TinyRun("--kinds tcp --cases 8B --rounds 1"),
        "loadtest.cpu_experts": TinyRun("--threads 1 --shapes 1 --megabytes 8"),
        "loadtest.cpu_kernels": TinyRun("--threads 1 --forms int8 --block-sizes 16 --shapes 1 --megabytes 8"),
        "loadtest.cpu_steps": TinyRun("--models llama-tiny --sequences 1,2 --repeats 1 --threads 1"),
        "loadtest.dense_steps": TinyRun(
            "--before {tree} --models llama-tiny --sequences 1 --threads 1 --rounds 2 --restarts 1"
        ),
        "loadtest.discovery": TinyRun("--scripts 2 --at-once 2 --seconds 4"),
        "loadtest.draw_passes": TinyRun("--rows 2 --vocab 1000"),
        "loadtest.first_light": TinyRun("--rounds 1 --streams 2"),
        "loadtest.fuzz": TinyRun("--examples 1 --frames 1"),
        "loadtest.gpu": TinyRun("--output {scratch}/out", "NOTHING MEASURED", "a CUDA device"),
        "loadtest.guidance": TinyRun("--batch 1 --tokens 4 --rounds 1 --vocabulary 1024"),
        "loadtest.handoff": TinyRun("--connector tcp --tokens 40 --repeats 1 --layers 1"),
        "loadtest.host_steps": TinyRun("--rows 1 --device-ms 6 --steps 4 --repeats 1"),
        "loadtest.host_tier": TinyRun("--tokens 100 --repeats 1 --layers 1"),
        "loadtest.hostile": TinyRun("--attack head-long"),
        "loadtest.kernels": TinyRun("", "NOTHING MEASURED", "a CUDA device"),
        "loadtest.kv_fp8": TinyRun("--tokens 20"),
        "loadtest.latent_decode": TinyRun("--threads 1 --rounds 1"),
        "loadtest.launch_cost": TinyRun("--rounds 100"),
        "loadtest.launches": TinyRun("--shape llama-tiny"),
        "loadtest.limits": TinyRun("--limit 20 --only window", "VERDICT", judges=True),
        "loadtest.lost_streams": TinyRun(
            "--events 1 --clients 2 --questions 4 --longest 20 --logs {scratch}"
        ),
        "loadtest.observed": TinyRun("--seconds 2", judges=True),
        "loadtest.overload": TinyRun("--workers 1 --times 2 --seconds 7", judges=True),
        "loadtest.page_cost": TinyRun(
            "--workers 2 --streams 4 --windows 2 --seconds 1 --tokens-per-s 50", "VERDICT", judges=True
        ),
        "loadtest.page_images": TinyRun("--into {scratch} --fill 3"),
        "loadtest.peers": TinyRun("--peers {scratch}", "scripts/peers installs it", "vLLM"),
        "loadtest.placement": TinyRun("--seconds 2 --parts sharing,conditional", "requests", judges=True),
        "loadtest.planner": TinyRun(
            "--seeds 1 --hours 0.5 --bursts 0", "of the GPU-hours of that pair", judges=True
        ),
        "loadtest.planner.oracle": TinyRun("--seeds 1 --hours 0.5"),
        "loadtest.pool_costs": TinyRun("--before {tree} --rows 1 --rounds 2 --restarts 1"),
        "loadtest.quantized_speed": TinyRun("--shape llama-small --sequences 1 --rounds 1 --threads 1"),
        "loadtest.random_requests": TinyRun("--requests 4 --at-once 2"),
        "loadtest.resident": TinyRun("--shapes llama-tiny --kept bf16"),
        "loadtest.router_maxima": TinyRun("--repeats 1"),
        "loadtest.rollout": TinyRun("--clients 2 --scenario 'both at once' --logs {scratch}"),
        "loadtest.routers": TinyRun(
            "--streams 4 --workers 2 --seconds 1 --repeats 1 --tokens-per-s 50", "VERDICT", judges=True
        ),
        "loadtest.sampling_maxima": TinyRun("--case logit_bias --tokens 4 --rounds 1 --at-most 1000"),
        "loadtest.second_turns": TinyRun("--models llama-tiny --repeats 1", "second turn", judges=True),
        "loadtest.sigterm_starts": TinyRun(
            "--repeats 1 --role router --moment 0.2", "SIGTERM after|is missing", judges=True
        ),
        "loadtest.soak": TinyRun("--minutes 0.1 --clients 2 --logs {scratch}"),
        "loadtest.speculation": TinyRun("--batch 1 --max-tokens 8 --repeats 1"),
        "loadtest.split": TinyRun("--parts bursts --model llama-tiny --repeats 1"),
        "loadtest.switch_interval": TinyRun("--rows 2 --step-ms 6 --intervals 5 --seconds 0.5 --rounds 1"),
        "loadtest.switches": TinyRun("--switches 1 --clients 2 --questions 4 --longest 20 --logs {scratch}"),
        "loadtest.token_limits": TinyRun("--limit 300 --seconds 2", "VERDICT", judges=True),
        "scripts.chart_options": TinyRun(),
        "scripts.dashboard_pictures": TinyRun("--seconds 5 --into {scratch}"),
        "scripts.dashboards": TinyRun(),
        "scripts.fresh_installs": TinyRun("", NO_PACKAGE, "an index of packages"),
        "scripts.from_vllm": TinyRun(),
        "scripts.image_contents": TinyRun(
            "--image router", f"{NO_PACKAGE}|not on this machine", "an index of packages"
        ),
        "scripts.newcomer": TinyRun(
            "--source {tree}", "cannot be cloned", "a repository, and an index of packages"
        ),
        "scripts.pictures": TinyRun(),
        "scripts.reference": TinyRun(),
        "tests.support.busy_loop": TinyRun(),
        "tests.support.chart": TinyRun("extras"),
    }
)


def named_programs() -> Iterator[str]:
    """Yield each program of this repository that a page tells a reader to run, again and again."""
    for command in commands():
        if command.words[:2] == ("python", "-m") and command.words[2].partition(".")[0] in PACKAGES:
            yield command.words[2]
