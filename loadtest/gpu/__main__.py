"""Every claim about GPUs, measured on a machine that may have nothing but torch, and no network.

    python -m loadtest.gpu --call 1 --output DIR                 # less than nine minutes
    python -m loadtest.gpu --call 2 --output DIR --cache FILE    # and less than nine more
    python -m loadtest.gpu --output DIR                          # both
    python -m loadtest.gpu --only decode,serve --output DIR
    python -m loadtest.gpu report DIR > docs/benchmarks/2026-11-30-h100.md
    python -m loadtest.gpu --dry-run --output DIR                # no GPU: sizes that say nothing

Each part is a process of its own with a time limit, and writes its results to DIR at once: one that crashes,
hangs or breaks the device's context costs that part alone. FILE is the triton-cache.tar.gz of an earlier
call's DIR: its kernels need not be built again. The report is written from DIR, on any machine.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadtest.gpu.plan import BY_NAME, CALL_SECONDS, PARTS, Part, of_call
from loadtest.gpu.report import report
from loadtest.gpu.results import OK, SKIPPED, Results, read
from loadtest.gpu.running import Call, run, unpack_cache

FOUND = "import sys, torch; sys.exit(not torch.cuda.is_available())"


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["report"]:
        write_report(given[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--call", type=int, choices=(1, 2), help="the parts of one call; default: of both")
    parser.add_argument("--only", help=f"these parts, with commas: {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="default: %(default)s")
    parser.add_argument("--cache", type=Path, help="the kernels that an earlier call has built")
    parser.add_argument("--seconds", type=float, help=f"of the whole; default: {CALL_SECONDS} a call")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, two parts at a time")
    args = parser.parse_args(given)
    parts = of_call(args.call) if args.only is None else named(args.only, parser)
    if not args.dry_run and (reason := unusable()) is not None:
        sys.exit(f"loadtest.gpu: NOTHING MEASURED. {reason}")
    args.output.mkdir(parents=True, exist_ok=True)
    name = "parts" if args.only else "both" if args.call is None else f"call-{args.call}"
    seconds = args.seconds or CALL_SECONDS * (2 if args.call is None else 1)
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as tmp:
        folder = args.output.resolve()
        call = Call(name, parts, folder, Path(tmp), args.dry_run, seconds, jobs=2 if args.dry_run else 1)
        command = shlex.join(["python", "-m", "loadtest.gpu", *given])
        Results(call.results, "call").write("call", {"command": command, "dry": args.dry_run})
        if args.cache is not None:
            unpack_cache(args.cache, Path(tmp))
        outcomes = run(call)
    print(report(read(folder)))
    wrong = [outcome.part.name for outcome in outcomes if outcome.status not in (OK, SKIPPED)]
    if wrong:
        sys.exit(f"not measured as a whole: {', '.join(wrong)}")


def named(names: str, parser: argparse.ArgumentParser) -> list[Part]:
    unknown = [name for name in names.split(",") if name not in BY_NAME]
    if unknown:
        parser.error(f"--only names {', '.join(unknown)}; allowed: {', '.join(part.name for part in PARTS)}")
    return [BY_NAME[name] for name in names.split(",")]


def unusable() -> str | None:
    """Return why nothing can be measured here; None if it can."""
    tried = subprocess.run([sys.executable, "-c", FOUND], capture_output=True, text=True, env=os.environ)
    if tried.returncode == 0:
        return None
    if tried.stderr:
        return f"torch cannot be imported: {tried.stderr.strip().splitlines()[-1]}"
    return "It needs a CUDA device, and torch finds none here."


def write_report(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m loadtest.gpu report", description="Write the report.")
    parser.add_argument("folder", type=Path, help="the DIR that a run wrote to")
    args = parser.parse_args(arguments)
    if not any(args.folder.glob("*.jsonl")):
        sys.exit(f"{args.folder}: no results here (no *.jsonl)")
    sys.stdout.write(report(read(args.folder)))


if __name__ == "__main__":
    main()
