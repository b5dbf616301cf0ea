"""The kernels that a step's time goes to: torch's profiler over a replayed step and a prompt, as a table and
as a trace that a browser shows.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from loadtest.gpu.bench import Bench
from loadtest.gpu.model import Loaded

STEPS = 3
SHOWN = 25


def measure(bench: Bench) -> None:
    """Profile the smallest and the largest decode step, and the longest prompt."""
    loaded = Loaded.load(bench)
    context = bench.scale.contexts[0]
    rows = (min(bench.scale.batches), max(bench.scale.batches))
    steps: dict[str, Callable[[], object]] = {
        f"step-{count}": loaded.decode(count, context, "greedy") for count in rows
    }
    steps[f"prompt-{max(bench.scale.prompts)}"] = loaded.prompt(max(bench.scale.prompts))
    for name, step in steps.items():
        table(bench, name, step)


def on_device(event: FunctionEventAvg) -> bool:
    """Whether this is a kernel, and not the operation that launched it, which counts its time as well."""
    return event.device_type.name == "CUDA"


def table(bench: Bench, name: str, step: Callable[[], object]) -> None:
    """Write the kernels that took longest, and the trace beside the results."""
    for _ in range(2):
        step()
    bench.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.on_cuda else [])]
    with profile(activities=activities) as profiled:
        for _ in range(STEPS):
            step()
        bench.synchronize()
    attribute = "self_device_time_total" if bench.on_cuda else "self_cpu_time_total"
    events = [event for event in profiled.key_averages() if not bench.on_cuda or on_device(event)]
    times = sorted(((float(getattr(e, attribute)), e) for e in events), key=lambda one: -one[0])
    total = sum(time for time, _ in times)
    if not total:
        bench.results.missing(name, "the profiler saw no kernels")
    title = f"Kernels of {name}"
    bench.results.note(title, f"Microseconds a step, of {total / STEPS:.0f} in all; {len(times)} kernels.")
    for time, event in times[:SHOWN]:
        if time:
            calls, each = event.count / STEPS, time / event.count
            share = time / total
            bench.results.row(title, kernel=event.key[:90], calls=calls, us=each, share=share)
    profiled.export_chrome_trace(str(bench.results.path.parent / f"trace-{name}.json.gz"))
