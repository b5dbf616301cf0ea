"""``torch.compile`` of a forward pass, beside plain torch and the CPU's kernels.

    python -m loadtest.compiled

Decode steps of the demo model in float32 on one thread, with and without a pool that is mostly unused.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from baton import hub
from baton.models.loader import load_model
from baton_kernels.cpu.library import SWITCH
from tests.support.paged_steps import Case, lay_out

REPEATS = 21
UNUSED = (0, 2000)
"""The pool's blocks besides those of the step."""


def median_ms(run: Callable[[], Tensor]) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1e3 * sorted(times)[REPEATS // 2]


@torch.inference_mode()
def measure(kernels: str) -> None:
    torch.set_num_threads(1)
    model = load_model(hub.resolve_model("demo"), "float32")
    config = model.config
    compiled = torch.compile(model.forward, dynamic=True)
    for unused in UNUSED:
        case = Case(config.num_heads, config.num_kv_heads, config.head_dim, 16, None, (200,) * 8, ())
        pool, batch = lay_out(case, config.num_layers)
        pool = torch.cat((pool, pool.new_zeros(unused, *pool.shape[1:])))
        ids = torch.randint(0, config.vocab_size, (8,))
        size = f"8 sequences of 200 tokens, pool of {pool.nbytes >> 20} MiB"
        eager = median_ms(partial(model.forward, ids, batch, pool))
        print(f"{size}: {kernels} kernels {eager:.1f} ms", flush=True)
        if kernels == "plain":
            began = time.perf_counter()
            found = compiled(ids, batch, pool)
            first = time.perf_counter() - began
            differs = float((found - model.forward(ids, batch, pool)).abs().max())
            took = median_ms(partial(compiled, ids, batch, pool))
            print(f"{size}: compiled {took:.1f} ms, the first call {first:.1f} s, differs by {differs:.0e}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:  # a process settles only once which kernels it has
        for each in ("native", "plain"):
            command = [sys.executable, "-W", "ignore", "-m", "loadtest.compiled", each]
            subprocess.run(command, check=True, env={**os.environ, SWITCH: each})
