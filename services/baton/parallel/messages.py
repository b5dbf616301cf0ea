"""What the leader tells its ranks, and what they answer. Bulk (block ids, a step's tokens) is the frame's
payload, as int64."""

from __future__ import annotations

import msgspec


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message: load your part. Answered with the bytes of a block of its pool."""

    reply: int
    rank: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    place: int
    """Its number among the ranks of its node."""
    per_node: int
    """How many there are on each."""
    host: str
    """Where the others reach it."""
    model: str
    dtype: str
    quantization: str
    device: str
    load_format: str
    load_seed: int
    block_size: int
    num_threads: int | None
    log_level: int


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Meet the others at the leader's store. Answered when all have met."""

    reply: int
    host: str
    port: int


class NewPool(msgspec.Struct, frozen=True, tag="pool"):
    """The pool to serve from, in place of any before, and its host tier. Answered when it is there."""

    reply: int
    num_blocks: int
    num_host_blocks: int


class Scratch(msgspec.Struct, frozen=True, tag="scratch"):
    """A pool to measure with: the peak of the device's memory counts from here on. Answered."""

    reply: int
    num_blocks: int


class Spare(msgspec.Struct, frozen=True, tag="spare"):
    """Answered with the blocks that the device has memory for, beside the peak since ``Scratch``. The scratch
    pool is gone then."""

    reply: int
    device_memory_fraction: float


class StepLayout(msgspec.Struct, frozen=True, tag="step"):
    """One step: how its buffer of int64 is laid out, and which logits are made of it.

    The buffer: token ids, positions, slot blocks and slot offsets ([num_tokens] each), the contexts
    [num_decode] and tables [num_decode, width] of the decoding rows, the table of each chunk, the rows to
    make logits of, their tables [num_rows, wanted_width] if nothing else is wanted, the sources and targets
    of block copies, and the lengths [num_tokens] if ``with_lengths``.
    """

    num_tokens: int
    num_decode: int
    width: int
    chunks: tuple[tuple[int, int, int], ...]
    """Of each chunk: tokens, context, blocks in its table."""
    num_rows: int
    """Rows whose logits are made last; 0: none."""
    narrow: bool
    """Whether nothing is made of the other rows (``PagedBatch.wanted``)."""
    wanted_width: int
    num_copies: int
    with_lengths: bool
    prompts: tuple[tuple[int, int], ...]
    """First row and number of rows of each run whose logits are made before, in pieces of ``PROMPT_ROWS``."""
    reply: int = 0
    """Answered when the step is over, if not 0. Logits say that too."""

    @property
    def sizes(self) -> list[int]:
        """Of the buffer's parts, in order."""
        return [
            *[self.num_tokens] * 4,
            self.num_decode,
            self.num_decode * self.width,
            *(blocks for _, _, blocks in self.chunks),
            self.num_rows,
            self.num_rows * self.wanted_width,
            self.num_copies,
            self.num_copies,
            self.num_tokens * self.with_lengths,
        ]


class CopyBlocks(msgspec.Struct, frozen=True, tag="copy"):
    """Copies between pool and host tier, carried out at once, beside a step that runs. The payload: pairs of
    (slot to write, block to read), then of (block to write, slot to read). Answered when they are over."""

    reply: int
    num_saves: int
    num_restores: int


class ServeLinks(msgspec.Struct, frozen=True, tag="links"):
    """Have the pool, which is to stay, read and written by connectors, as the leader's other socket says
    (``baton.connector.ranks``). Answered."""

    reply: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The last message. Not answered."""


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """What was asked for is done."""

    to: int
    value: int = 0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A rank's last message: why it cannot go on, in a line."""

    why: str


Work = Start | Connect | NewPool | Scratch | Spare | ServeLinks | StepLayout
"""What a rank does in order."""
ToRank = Work | CopyBlocks | Stop
ToLeader = Reply | Failed
