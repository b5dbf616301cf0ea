"""What the host launches in one step of a model, counted without a device.

    python -m loadtest.launches                       # an 8B Llama
    python -m loadtest.launches --shape llama-125m

The model's own forward pass runs, output head included, over tensors that have a shape but no memory.
Triton's kernels are counted where they would be launched, and with them torch's operations that are kernels
too: views and empty tensors are none. A decode step that is replayed as a graph is one launch, whatever it
counts here. A step with prompts that is replayed in pieces is counted that way beside.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baton.engine import pieces
from baton.engine.defaults import LARGEST_GRAPH
from baton.engine.pieces import PiecewiseModel, piece_sizes
from baton.models import decoder
from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.loader import new_kv_pool
from baton.models.quantization import plain
from baton.models.quantization.plain import PLAIN
from baton.parallel.collectives import Parallel
from baton_kernels.paged import Chunk, PagedBatch, WantedRows
from loadtest.shapes import SHAPES, save_unfilled

META = torch.device("meta")
BLOCK_SIZE = 64
BLOCKS = 4096
_FREE = ("empty", "detach", "lift_fresh", "_unsafe_view")


@dataclass(frozen=True)
class StepShape:
    """A step to count."""

    decode: int = 0
    """Decoding sequences."""
    queries: int = 1
    """Rows of each."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(tokens cached before, length) of each chunk."""

    def batch(self) -> PagedBatch:
        """The step's description, its tensors without memory."""
        rows = self.decode * self.queries
        tokens = rows + sum(length for _, length in self.chunks)
        chunks, start = [], rows
        for cached, length in self.chunks:
            blocks = -(-(cached + length) // BLOCK_SIZE)
            chunks.append(Chunk(start, length, cached + length, _numbers(blocks)))
            start += length
        wanted = None
        if chunks:
            wanted = WantedRows(_numbers(rows + len(chunks)), _numbers(rows + len(chunks), 16))
        return PagedBatch(
            positions=_numbers(tokens),
            slot_blocks=_numbers(tokens),
            slot_offsets=_numbers(tokens),
            num_decode=rows,
            decode_tables=_numbers(self.decode, 16),
            decode_contexts=_numbers(rows),
            chunks=tuple(chunks),
            wanted=wanted,
            decode_queries=self.queries,
        )


STEPS: Mapping[str, StepShape] = MappingProxyType(
    {
        "decode, 64 rows": StepShape(decode=64),
        "verify, 64 sequences of 5": StepShape(decode=64, queries=5),
        "prompt, 2048": StepShape(chunks=((0, 2048),)),
        "prompt, 256 behind 30720": StepShape(chunks=((30720, 256),)),
        "mixed, 64 rows and 512": StepShape(decode=64, chunks=((0, 512),)),
        "mixed, 64 rows and 256": StepShape(decode=64, chunks=((0, 256),)),
        "mixed, 64 rows, a draft of 5, and 512": StepShape(decode=64, chunks=((500, 5), (0, 512))),
    }
)


def _numbers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=META)


@dataclass
class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A count of what is launched within this context, by name."""

    kernels: Counter[str] = field(default_factory=Counter)
    """Triton's kernels."""
    operations: Counter[str] = field(default_factory=Counter)
    """torch's."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and not name.startswith(_FREE) and not _is_the_host_s(out):
            self.operations[name] += 1
        return out

    @property
    def total(self) -> int:
        return self.kernels.total() + self.operations.total()


def _is_the_host_s(out: object) -> bool:
    """Whether an operation's result stays in host memory."""
    return isinstance(out, Tensor) and out.device.type == "cpu"


@contextmanager
def counting(processors: int = 132, arch: int = 90) -> Iterator[Launches]:
    """Count launches for a device of this kind, which need not be there."""
    from triton import JITFunction
    from triton.runtime.interpreter import InterpretedFunction

    from baton_kernels.cuda import rows as on_device
    from baton_kernels.cuda.launch import BoundKernel
    from baton_kernels.cuda.shapes import Device

    counted = Launches()

    def count(self: Any, *args: Any, **kwargs: Any) -> None:
        counted.kernels[self.fn.__name__.strip("_")] += 1

    def counting_launcher(self: Any, grid: object) -> Callable[..., None]:
        return partial(count, self)

    def counting_bound(self: BoundKernel, grid: object) -> Callable[..., None]:
        return partial(count, self.kernel)

    with ExitStack() as patched:
        patched.enter_context(patch.object(JITFunction, "run", count))
        patched.enter_context(patch.object(BoundKernel, "__getitem__", counting_bound))
        # Where triton was told to interpret, its kernels are of another class.
        patched.enter_context(patch.object(InterpretedFunction, "__getitem__", counting_launcher))
        patched.enter_context(patch.object(Device, "of", lambda _: Device(processors, arch)))
        # These ask for a CUDA tensor, where attention asks for one that is not in host memory.
        patched.enter_context(patch.object(decoder, "add_norm", on_device.add_norm))
        patched.enter_context(patch.object(plain, "gated_product", on_device.gated_product))
        patched.enter_context(torch.inference_mode())
        patched.enter_context(counted)
        yield counted


def model_of(shape: Mapping[str, object]) -> CausalLM:
    """A model of a shape, without memory for its weights."""
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig.from_dir(save_unfilled(Path(folder), shape))
    with META:
        model = Decoder(config, torch.bfloat16, Parallel.alone(config), PLAIN)
    model.pack()
    return model.eval()


def launches_of(model: CausalLM, step: StepShape) -> Launches:
    """The launches of a step, from token ids to logits."""
    pool = new_kv_pool(model.config, BLOCKS, BLOCK_SIZE, model.dtype, META)
    batch = step.batch()
    token_ids = _numbers(batch.positions.numel())
    with counting() as counted:
        model.logits(model.forward(token_ids, batch, pool))
    return counted


@dataclass
class CountedPieces:
    """A ``PieceRecorder`` whose pieces count as one launch each, when they are replayed."""

    launches: Launches
    counted: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))

    @contextmanager
    def step(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        self.counted = self.launches.kernels.copy(), self.launches.operations.copy()

    def end(self) -> CountedPieces:
        self.launches.kernels, self.launches.operations = self.counted
        return self

    def replay(self) -> None:
        self.launches.kernels["graph"] += 1


def launches_in_pieces(model: CausalLM, step: StepShape) -> Launches | None:
    """The launches of a step that is replayed in pieces; None: it is too large to be."""
    pool = new_kv_pool(model.config, BLOCKS, BLOCK_SIZE, model.dtype, META)
    batch = step.batch()
    token_ids = _numbers(batch.positions.numel())
    with counting() as counted, patch.object(pieces, "check_replay"):
        size = next((size for size in piece_sizes(LARGEST_GRAPH) if size >= len(token_ids)), None)
        if size is None or not batch.chunks:
            return None
        graphed = PiecewiseModel(model, pool, (size,), CountedPieces(counted))
        counted.kernels, counted.operations = Counter(), Counter()
        graphed.logits(graphed.forward(token_ids, batch, pool))
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    model = model_of(SHAPES[parser.parse_args().shape])
    depth = model.config.num_layers
    table = Table("step", "launches", "a layer", "attention a layer", "of Triton", "of torch")
    for name, step in STEPS.items():
        ways = {name: launches_of(model, step), f"{name}, in pieces": launches_in_pieces(model, step)}
        for way, counted in ways.items():
            if counted is None:
                continue
            attention = counted.kernels["decode"] + counted.kernels["prefill"]
            table.add_row(
                way,
                str(counted.total),
                f"{counted.total / depth:.1f}",
                f"{attention / depth:.1f}",
                ", ".join(f"{kernel} {count}" for kernel, count in counted.kernels.most_common()),
                ", ".join(f"{operation} {count}" for operation, count in counted.operations.most_common()),
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
