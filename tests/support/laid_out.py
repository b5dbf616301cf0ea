"""A bare model over a pool of pages: steps of any sequences, without an engine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from baton.models.base import CausalLM
from baton.models.loader import kv_layout, new_page_pool
from baton_kernels.kv_layout import TokenKV
from baton_kernels.paged import Chunk, PagedBatch, PagedTables, Planner, StateRows, StateSegment, WantedRows
from baton_kernels.window import ChunkedWindow


@dataclass
class Laid:
    """The pages of one sequence."""

    tables: list[list[int]]
    """The pages of each table of the token groups."""
    state: list[int]
    length: int = 0
    freed: dict[int, int] = field(default_factory=dict)
    """Leading blocks of each table that no later token sees."""


class LaidOut:
    """Computes steps of a model that has been laid out. Pages are given out in a random order; page 0 is
    nobody's and full of NaN."""

    def __init__(
        self,
        model: CausalLM,
        block_size: int,
        num_pages: int = 600,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
        planner: Planner | None = None,
    ) -> None:
        """``kv_dtype``: the type of the pool's numbers; None: the model's. ``planner``: as in
        ``PagedBatch``."""
        self.model = model
        kv_dtype = kv_dtype or model.dtype
        self.layout = kv_layout(model.config, block_size, kv_dtype, model.shard)
        model.lay_out(self.layout)
        self.pool = new_page_pool(self.layout, num_pages, kv_dtype, "cpu")
        self._planner = planner
        self.pool[0] = float("nan")
        self._free = list(range(1, num_pages))
        random.Random(seed).shuffle(self._free)
        self._sequences: dict[str, Laid] = {}

    def step(self, work: Mapping[str, Sequence[int]], *, cut: int = 0) -> dict[str, Tensor]:
        """Compute these tokens behind those of each sequence before -> the logits of all, [tokens, vocab].
        With ``cut``, the state of a chunk is kept after its first ``cut`` tokens too."""
        singles = [name for name, ids in work.items() if len(ids) == 1]
        names = [*singles, *(name for name in work if name not in singles)]
        batch = self._batch(names, work, len(singles), cut)
        tokens = torch.tensor([token for name in names for token in work[name]])
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(tokens, batch, self.pool))
        for name in names:
            self._sequences[name].length += len(work[name])
            self._free_unseen(self._sequences[name])
        parts = torch.split(logits, [len(work[name]) for name in names])
        return dict(zip(names, parts, strict=True))

    def step_wanted(self, work: Mapping[str, Sequence[int]], wanted: Sequence[str]) -> list[Tensor]:
        """Compute these chunks -> the logits behind the last token of the sequences ``wanted`` alone, in that
        order."""
        names = list(work)
        batch = self._batch(names, work, 0, 0)
        last = {name: chunk.start + chunk.length - 1 for name, chunk in zip(names, batch.chunks, strict=True)}
        laid = [self._sequences[name] for name in wanted]
        width = max([len(one.tables[0]) for one in laid], default=0)
        tables = [torch.zeros((len(wanted), width), dtype=torch.int64) for _ in range(self.layout.num_tables)]
        for table, rows in enumerate(tables):
            for row, one in zip(rows, laid, strict=True):
                row[: len(one.tables[table])] = torch.tensor(one.tables[table])
        rows = torch.tensor([last[name] for name in wanted], dtype=torch.int64)
        more = [replace(own, wanted_tables=pages) for own, pages in zip(batch.more, tables[1:], strict=True)]
        batch = replace(batch, wanted=WantedRows(rows, tables[0]), more=tuple(more))
        tokens = torch.tensor([token for name in names for token in work[name]])
        with torch.inference_mode():
            logits = list(self.model.logits(self.model.forward(tokens, batch, self.pool)))
        for name in names:
            self._sequences[name].length += len(work[name])
            self._free_unseen(self._sequences[name])
        return logits

    def _batch(
        self, names: list[str], work: Mapping[str, Sequence[int]], num_decode: int, cut: int
    ) -> PagedBatch:
        laid = [self._grown(name, len(work[name])) for name in names]
        size = self.layout.block_size
        positions = [
            torch.arange(one.length, one.length + len(work[n])) for one, n in zip(laid, names, strict=True)
        ]
        contexts = [one.length + len(work[name]) for one, name in zip(laid, names, strict=True)]
        width = max([len(one.tables[0]) for one in laid[:num_decode]], default=0)
        tables: list[PagedTables] = []
        for table in range(self.layout.num_tables):
            pages = [torch.tensor(one.tables[table]) for one in laid]
            slots = [own[at // size] for own, at in zip(pages, positions, strict=True)]
            rows = torch.zeros((num_decode, width), dtype=torch.int64)
            for row, own in zip(rows, pages, strict=False):
                row[: len(own)] = own
            chunk_tables = [own[: -(-c // size)] for own, c in zip(pages, contexts, strict=True)]
            tables.append(PagedTables(torch.cat(slots), rows, tuple(chunk_tables[num_decode:])))
        chunks, start = [], num_decode
        for at in range(num_decode, len(names)):
            length = len(work[names[at]])
            chunks.append(Chunk(start, length, contexts[at], tables[0].chunk_tables[at - num_decode]))
            start += length
        whole = torch.cat(positions)
        return PagedBatch(
            positions=whole,
            slot_blocks=tables[0].slot_blocks,
            slot_offsets=whole % size,
            num_decode=num_decode,
            decode_tables=tables[0].decode_tables,
            decode_contexts=torch.tensor(contexts[:num_decode], dtype=torch.int64),
            chunks=tuple(chunks),
            more=tuple(tables[1:]),
            states=self._states(laid, chunks, num_decode, cut),
            planner=self._planner,
        )

    def _states(self, laid: list[Laid], chunks: list[Chunk], num_decode: int, cut: int) -> StateRows | None:
        pages = self.layout.state_pages
        if not pages:
            return None
        sources = [one.state if one.length else [-1] * pages for one in laid]
        targets = [one.state for one in laid]
        segments: list[StateSegment] = []
        for at, chunk in enumerate(chunks, num_decode):
            source, target, start, length = (
                torch.tensor(sources[at]),
                torch.tensor(targets[at]),
                chunk.start,
                chunk.length,
            )
            if 0 < cut < length:
                middle = torch.tensor([self._free.pop() for _ in range(pages)])
                segments.append(StateSegment(start, cut, source, middle))
                source, start, length = middle, start + cut, length - cut
            segments.append(StateSegment(start, length, source, target))
        shape = (num_decode, pages)
        return StateRows(
            torch.tensor(sources[:num_decode], dtype=torch.int64).view(shape),
            torch.tensor(targets[:num_decode], dtype=torch.int64).view(shape),
            tuple(segments),
        )

    def _grown(self, name: str, more: int) -> Laid:
        if name not in self._sequences:
            state = [self._free.pop() for _ in range(self.layout.state_pages)]
            self._sequences[name] = Laid([[] for _ in range(self.layout.num_tables)], state)
        one = self._sequences[name]
        needed = -(-(one.length + more) // self.layout.block_size)
        for table in one.tables:
            table.extend(self._free.pop() for _ in range(needed - len(table)))
        return one

    def _free_unseen(self, one: Laid) -> None:
        """Give the pages back that no later token sees: they are page 0 in the table from then on."""
        for group in self.layout.token_groups:
            assert isinstance(group.kv, TokenKV)
            window = group.kv.window
            if window is None:
                continue
            if isinstance(window, ChunkedWindow):
                first_seen = one.length // window.size * window.size
            else:
                first_seen = max(0, one.length - window + 1)
            for table in group.tables:
                for block in range(one.freed.get(table, 0), first_seen // self.layout.block_size):
                    self.pool[one.tables[table][block]] = float("nan")
                    self._free.append(one.tables[table][block])
                    one.tables[table][block] = 0
                one.freed[table] = first_seen // self.layout.block_size
