"""A model over two ranks, of which one is killed in a step: what its owner is told, a line for each call.

    python -m tests.support.killed_rank MODEL

A program of its own, which can be ended where torch waits for ever: inside of a test nothing could end that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import psutil

from baton import LLM, SamplingParams
from baton.parallel.ranks import RankError

STEPS = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
AFTER_S = 0.3
CALLS = 100


def main(model: str) -> None:
    llm = LLM(
        model,
        dtype="float32",
        device="cpu",
        num_blocks=24,
        max_num_batched_tokens=64,
        prefill_chunk=32,
        num_threads=1,
        tensor_parallel_size=2,
    )
    [rank] = psutil.Process().children()
    print(rank.pid, flush=True)
    threading.Timer(AFTER_S, os.kill, (rank.pid, signal.SIGKILL)).start()
    for calls in (CALLS, 1):
        try:
            for _ in range(calls):
                llm.generate([[1, 2, 3]], STEPS, progress=False)
        except RankError as error:
            print(error, flush=True)
    llm.close()


if __name__ == "__main__":
    main(sys.argv[1])
