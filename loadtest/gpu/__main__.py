"""Everything that is claimed of a GPU, measured in one run.

    python -m loadtest.gpu                   # writes docs/benchmarks/<date>-gpu.md
    python -m loadtest.gpu --only step,serve
    python -m loadtest.gpu --dry-run         # no GPU: the same code on the CPU, with sizes that say nothing

An 8B Llama in bfloat16 with random weights: its decode step as a share of the bandwidth of a copy, replayed
and eager, its prompts as a share of the rate of a matmul, attention beside torch's and FlashInfer's, KV
blocks between two processes, and the whole served beside transformers' continuous batching.
"""

from __future__ import annotations

import argparse
import logging
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

import torch
from rich.console import Console
from rich.table import Table

from loadtest.gpu import attention, handoff, serve, step
from loadtest.gpu.bench import FULL, TINY, Bench, Section

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
PARTS: Mapping[str, Callable[[Bench], list[Section]]] = MappingProxyType(
    {
        "step": step.measure,
        "attention": attention.measure,
        "handoff": handoff.measure,
        "serve": serve.measure,
    }
)
PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "ucxx-cu13")


def versions(device: torch.device) -> list[str]:
    """Lines that say what was measured, and on what."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return [f"- Device: {name}", f"- Baton: {commit or 'unknown'}", f"- Software: {', '.join(found)}"]


def show(section: Section, console: Console) -> None:
    table = Table(*section.columns, title=section.title, title_justify="left")
    for row in section.rows:
        table.add_row(*row)
    console.print(*section.notes, table, sep="\n")


def report(sections: list[Section], device: torch.device, dry: bool) -> str:
    date = time.strftime("%Y-%m-%d")
    head = [f"# A GPU, {date}" if not dry else f"# A dry run, {date}", ""]
    if dry:
        head += ["Nothing was measured: tiny shapes on a CPU, to see that the measurement runs.", ""]
    command = shlex.join(["python", "-m", "loadtest.gpu", *sys.argv[1:]])
    head += [*versions(device), f"- Command: `{command}`", ""]
    return "\n".join([*head, *(section.markdown() for section in sections)])


def run(parts: list[str], bench: Bench, console: Console) -> tuple[list[Section], list[str]]:
    """The sections, and which parts failed: what the others found is kept."""
    sections: list[Section] = []
    failed = []
    for part in parts:
        try:
            found = PARTS[part](bench)
        except Exception as error:
            log.exception("%s failed", part)
            found = [Section(f"{part}: FAILED", (), notes=[f"{type(error).__name__}: {error}"])]
            failed.append(part)
        for section in found:
            show(section, console)
        sections += found
    return sections, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, help="a Markdown file; default: docs/benchmarks/<date>-gpu.md")
    args = parser.parse_args()
    parts = args.only.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"--only is {args.only!r}; allowed: {', '.join(PARTS)}")
    if not args.dry_run and not torch.cuda.is_available():
        sys.exit("loadtest.gpu: NOTHING MEASURED. It needs a CUDA device, and torch finds none here.")
    device = torch.device("cpu" if args.dry_run else "cuda:0")
    output = args.output
    if output is None and not args.dry_run:
        output = ROOT / "docs" / "benchmarks" / f"{time.strftime('%Y-%m-%d')}-gpu.md"
    with tempfile.TemporaryDirectory() as tmp:
        bench = Bench(device, TINY if args.dry_run else FULL, Path(tmp))
        sections, failed = run(parts, bench, Console(width=140))
    if output is not None:
        output.write_text(report(sections, device, args.dry_run))
        print(f"written to {output}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
