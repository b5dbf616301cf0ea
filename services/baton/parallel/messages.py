"""The messages between the leader and its ranks. Bulk (block ids, a step's tokens) is the frame's payload, as
int64."""

from __future__ import annotations

import msgspec


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message, to load a part of the model. Answered with the bytes of a block of the rank's
    pool."""

    reply: int
    rank: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    place: int
    """The rank's number among the ranks of its node."""
    per_node: int
    """The number of ranks on each node."""
    host: str
    """The address at which other ranks reach this rank."""
    model: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    device: str
    load_format: str
    load_seed: int
    block_size: int
    num_threads: int | None
    log_level: int


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """The request to connect to the other ranks through the leader's store. Answered when all have
    connected."""

    reply: int
    host: str
    port: int


class NewPool(msgspec.Struct, frozen=True, tag="pool"):
    """The pool to serve from, in place of any before, and its host tier. Answered when it is allocated."""

    reply: int
    num_blocks: int
    num_host_blocks: int
    scratch: int = 0
    """Blocks behind these that belong to nobody."""


class Scratch(msgspec.Struct, frozen=True, tag="scratch"):
    """A pool to measure with: the peak of the device's memory counts from here on. Answered."""

    reply: int
    num_blocks: int


class Spare(msgspec.Struct, frozen=True, tag="spare"):
    """The request to measure spare memory. Answered with the blocks that the device has memory for, beside
    the peak since ``Scratch``. The scratch pool is freed."""

    reply: int
    device_memory_fraction: float
    scratch: int = 0
    """``NewPool.scratch`` of the pool to come."""


class Record(msgspec.Struct, frozen=True, tag="record"):
    """The request to record decode steps of ``sizes``, of tables of ``width`` blocks, the largest first. The
    leader does the same at the same time. Steps that fit are replayed from here on. Answered."""

    reply: int
    sizes: tuple[tuple[int, int], ...]
    """Sequences, and rows of each, ascending by rows."""
    width: int


class TryRecordings(msgspec.Struct, frozen=True, tag="try"):
    """The request to measure what the recordings of ``Record`` will take, in the pool of ``Scratch``; it
    counts in ``Spare``. The leader does the same at the same time. Answered."""

    reply: int
    sizes: tuple[tuple[int, int], ...]
    width: int


class StepLayout(msgspec.Struct, frozen=True, tag="step"):
    """One step: how its buffer of int64 is laid out, and which logits are made of it.

    The buffer: token ids, positions, slot blocks and slot offsets ([num_tokens] each), the contexts
    [num_decode] of the decoding rows and the tables [num_decode / decode_queries, width] of their sequences,
    the table of each chunk, the rows to make logits of, their tables [num_rows, wanted_width] if nothing else
    is wanted, the sources and targets of block copies, the lengths [num_tokens] if ``with_lengths``, and the
    columns of tokens that the step before chooses, with the places that they have among its choices. Then, of
    each further table: slot blocks, tables of the decoding sequences, the table of each chunk, and the tables
    of the rows to make logits of. Last, ``state_pages`` pages each: the sources of the decoding sequences'
    states, the targets of the decoding rows, the sources and the targets of ``segments``.
    """

    num_tokens: int
    num_decode: int
    width: int
    chunks: tuple[tuple[int, int, int], ...]
    """Tokens, context and blocks in its table, of each chunk."""
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
    """The question that is answered when the step is over; 0: none, as logits tell that too."""
    num_pending: int = 0
    """Tokens that the step before chooses. Only where there are no other ranks."""
    decode_queries: int = 1
    """Rows of each decoding sequence (``PagedBatch.decode_queries``)."""
    num_tables: int = 1
    """Tables of each sequence, one for each page of a block."""
    state_pages: int = 0
    """Pages of a sequence's state."""
    segments: tuple[tuple[int, int], ...] = ()
    """First row and length of each run of a chunk behind which a state is kept."""

    @property
    def sizes(self) -> list[int]:
        """The sizes of the buffer's parts, in order. The parts of further tables and of states are left out
        where there are none: every part costs each step a view."""
        first = [
            *[self.num_tokens] * 4,
            self.num_decode,
            self.num_decode // self.decode_queries * self.width,
            *(blocks for _, _, blocks in self.chunks),
            self.num_rows,
            self.num_rows * self.wanted_width,
            self.num_copies,
            self.num_copies,
            self.num_tokens * self.with_lengths,
            self.num_pending,
            self.num_pending,
        ]
        return first if self.num_tables == 1 and not self.state_pages else [*first, *self._more_sizes()]

    def _more_sizes(self) -> list[int]:
        sequences = self.num_decode // self.decode_queries
        tables = [
            self.num_tokens,
            sequences * self.width,
            *(blocks for _, _, blocks in self.chunks),
            self.num_rows * self.wanted_width,
        ]
        states = (sequences, self.num_decode, len(self.segments), len(self.segments))
        return [*tables * (self.num_tables - 1), *(self.state_pages * count for count in states)]


class CopyBlocks(msgspec.Struct, frozen=True, tag="copy"):
    """Copies between pool and host tier, carried out at once, beside a step that runs. The payload: pairs
    of (slot to write, block to read), then of (block to write, slot to read). Answered when the copies are
    over, unless ``reply`` is 0: on CUDA a later step is put behind them."""

    reply: int
    num_saves: int
    num_restores: int


class ServeLinks(msgspec.Struct, frozen=True, tag="links"):
    """The request to let connectors read and write the pool, which is to stay, over the leader's other socket
    (``baton.transport.ranks``). Answered."""

    reply: int


class StopRank(msgspec.Struct, frozen=True, tag="stop"):
    """The last message. Not answered."""


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to a message: it is done."""

    to: int
    value: int = 0


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A rank's last message: why it cannot go on, in a line."""

    why: str


Work = Start | Connect | NewPool | Scratch | TryRecordings | Spare | Record | ServeLinks | StepLayout
"""Messages that a rank works on in order."""
ToRank = Work | CopyBlocks | StopRank
ToLeader = Reply | RankFailed
