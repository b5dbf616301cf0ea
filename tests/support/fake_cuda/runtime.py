"""The part of ``torch.cuda`` that programs call: streams, events and graphs.

The classes are bound to a device by deriving from them (``FakeCuda`` does), as torch's know theirs from the
driver.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tests.support.fake_cuda.streams import Capture, Queue, Work, cuda_error

if TYPE_CHECKING:
    from tests.support.fake_cuda.device import FakeCuda

Device = int | str | torch.device | None


class Stream:
    """See ``torch.cuda.Stream``. Like that, it does not wait for the default stream by itself."""

    cuda: ClassVar[FakeCuda]

    def __init__(self, device: Device = None, priority: int = 0, *, queue: Queue | None = None) -> None:
        self.priority = priority
        self.queue = queue or self.cuda.timeline.new_queue(self.cuda.index_of(device))

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.queue.device)

    @property
    def device_index(self) -> int:
        return self.queue.device

    @property
    def cuda_stream(self) -> int:
        return self.queue.number

    @property
    def stream_id(self) -> int:
        return self.queue.number

    def synchronize(self) -> None:
        self.cuda.timeline.finish_queue(self.queue, "Stream.synchronize")

    def query(self) -> bool:
        last = self.queue.last
        return last is None or self.cuda.timeline.poll(last, "Stream.query")

    def record_event(self, event: Event | None = None) -> Event:
        event = event or self.cuda.Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return hash(self.queue)


class Event:
    """See ``torch.cuda.Event``."""

    cuda: ClassVar[FakeCuda]

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._timed = enable_timing
        self.mark: Work | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.cuda.current_stream()
        self.mark = self.cuda.timeline.mark(stream.queue)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for what was recorded. A stream that waits for a stream that is being captured
        is captured with it."""
        if self.mark is None:
            return
        queue = (stream or self.cuda.current_stream()).queue
        recorded = self.mark.queue.capture if self.mark.captured else None
        if self.mark.captured and recorded is None:
            raise cuda_error("event recorded in a capture that has ended", "wait_event")
        if recorded is not None and queue.capture is None:
            queue.capture = recorded
            recorded.queues.append(queue)
        if queue.capture is not recorded:
            queue.capture.broken = "wait_event"
            raise cuda_error("dependency created on uncaptured work in another stream", "wait_event")
        if recorded is None:
            self.cuda.timeline.issue(queue, "mark", "", None, self.mark)

    def synchronize(self) -> None:
        if self.mark is not None:
            self.cuda.timeline.finish(self.mark, "Event.synchronize")

    def query(self) -> bool:
        return self.mark is None or self.cuda.timeline.poll(self.mark, "Event.query")

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between the two, both of which are over."""
        if not (self._timed and end._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.mark and end.mark and self.mark.done and end.mark.done):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end.mark.when - self.mark.when) * 1e3


class CUDAGraph:
    """See ``torch.cuda.CUDAGraph``. Its work runs in the order in which it was recorded, whatever the streams
    that took part."""

    cuda: ClassVar[FakeCuda]

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None
        self._work: tuple[Callable[[], object], ...] | None = None
        self.launched: tuple[str, ...] = ()
        """What is replayed, by kind and name."""
        self._pool: tuple[int, int] | None = None

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        queue = self.cuda.current_stream().queue
        if queue is self.cuda.default_queue(queue.device):
            raise cuda_error("operation not permitted", "capture of the default stream")
        self._pool = pool or self.cuda.graph_pool_handle()
        self._capture = Capture(capture_error_mode, self._pool)
        self._capture.queues.append(queue)
        queue.capture = self._capture
        self.cuda.timeline.captures.append(self._capture)

    def capture_end(self) -> None:
        capture, self._capture = self._capture, None
        if capture is None:
            raise cuda_error("illegal state", "capture_end")
        self.cuda.timeline.captures.remove(capture)
        for queue in capture.queues:
            queue.capture = None
        if capture.broken:
            raise cuda_error("operation failed due to a previous error during capture", capture.broken)
        if not capture.work:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on "
                "wrong device or stream.",
                stacklevel=3,
            )
        shown = [work for work in capture.work if work.kind not in ("garbage", "mark")]
        self.launched = tuple(f"{work.kind} {work.name}" for work in shown)
        self._work = tuple(work.run for work in capture.work if work.run is not None)

    def replay(self) -> None:
        work = self._work
        if work is None:
            raise cuda_error("illegal state", "replay of a graph that was not captured")

        def run() -> None:
            for part in work:
                part()

        queue = self.cuda.current_stream().queue
        self.cuda.timeline.issue(queue, "replay", "", run, seconds=self.cuda.step_seconds)

    def reset(self) -> None:
        self._work = None

    def pool(self) -> tuple[int, int] | None:
        return self._pool


class graph:  # noqa: N801 (its name in torch.cuda)
    """See ``torch.cuda.graph``. Captures on a stream of the current device, unless a stream is given."""

    cuda: ClassVar[FakeCuda]

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: tuple[int, int] | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph = cuda_graph
        self._pool = pool
        self._stream = stream or self.cuda.Stream()
        self._mode = capture_error_mode
        self._entered: StreamContext | None = None

    def __enter__(self) -> None:
        self.cuda.synchronize()
        self._entered = self.cuda.stream(self._stream)
        self._entered.__enter__()
        self._graph.capture_begin(self._pool, self._mode)

    def __exit__(self, *error: object) -> None:
        try:
            self._graph.capture_end()
        finally:
            assert self._entered is not None
            self._entered.__exit__(None, None, None)


class StreamContext:
    """See ``torch.cuda.stream``."""

    cuda: ClassVar[FakeCuda]

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._before: tuple[int, Stream] | None = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = self.cuda.current_device(), self.cuda.current_stream(self._stream.device)
            self.cuda.set_stream(self._stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            device, stream = self._before
            self.cuda.set_stream(stream)
            self.cuda.set_device(device)


class DeviceContext:
    """See ``torch.cuda.device``."""

    cuda: ClassVar[FakeCuda]

    def __init__(self, device: Any) -> None:
        self._index = self.cuda.index_of(device) if device is not None and device != -1 else None
        self._before: int | None = None

    def __enter__(self) -> None:
        if self._index is not None:
            self._before = self.cuda.current_device()
            self.cuda.set_device(self._index)

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            self.cuda.set_device(self._before)


class CurrentStreams(threading.local):
    """The current stream of each device, of each thread by itself."""

    def __init__(self) -> None:
        self.by_device: dict[int, Stream] = {}
