"""One part, in this process: ``python -m loadtest.gpu.child NAME RESULTS TMP LIMIT [--dry-run]``.

Two seconds before its limit all threads' stacks are written to the log, and likewise if it crashes.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from loadtest.gpu.plan import BY_NAME
from loadtest.gpu.results import Results, SkipPartError
from loadtest.gpu.running import SKIPPED_STATUS
from loadtest.gpu.scale import FULL, TINY

STACKS_S = 2.0
"""The seconds before the limit at which stacks are shown."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=list(BY_NAME))
    parser.add_argument("results", type=Path)
    parser.add_argument("tmp", type=Path)
    parser.add_argument("limit", type=float)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    part = BY_NAME[args.part]
    if args.limit > STACKS_S:
        faulthandler.dump_traceback_later(args.limit - STACKS_S)
    results = Results(args.results, part.name)
    scale = TINY if args.dry_run else FULL
    try:
        measure: Callable[..., None] = import_module(f"loadtest.gpu.parts.{part.module}").measure
        from loadtest.gpu.bench import Bench  # torch: a part that cannot import it has failed

        bench = Bench.start(results, scale, args.tmp / part.name, args.limit, dry=args.dry_run)
        measure(bench, *([part.argument] if part.argument else []))
    except SkipPartError as reason:
        print(reason)
        end(SKIPPED_STATUS)
    except Exception:  # noqa: BLE001 (shown here: threads of libraries may make a crash of the end)
        traceback.print_exc()
        end(1)
    end(0)


def end(status: int) -> NoReturn:
    """End at once: threads of NCCL and of gloo may outlive their connectors, and nothing is left to do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
