"""Speculation with a draft model: a small model of the same tokenizer writes ahead, and the large one
verifies its tokens (https://arxiv.org/abs/2211.17192)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from baton.models.base import CausalLM
from baton.models.loader import new_kv_pool
from baton.speculation.drafter import TokenSequence
from baton_kernels.paged import Chunk, PagedBatch

MAX_ROWS = 4
"""Most tokens of a sequence that are computed as rows of their own, batched with other sequences' rows; more
tokens go as a chunk."""

Forward = Callable[[Tensor, PagedBatch, Tensor], Tensor]
"""``CausalLM.forward``, or what takes its place."""
Replay = Callable[[CausalLM, Tensor], Forward]
"""A function that records passes of a model over a pool, whose last block belongs to nobody, and returns the
forward pass that replays them."""


@dataclass(slots=True)
class _Cache:
    """One sequence's part of the pool."""

    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    """Leading tokens of the sequence whose KV is in the blocks."""
    drafts: list[int] = field(default_factory=list)
    """Drafts behind these tokens whose KV is in the blocks too: tokens of the sequence as far as they were
    accepted."""

    def settle(self, token_ids: Sequence[int]) -> None:
        """Counts the drafts that have become tokens, and leaves the last token to be computed."""
        for draft in self.drafts:
            if self.tokens == len(token_ids) or draft != token_ids[self.tokens]:
                break
            self.tokens += 1
        self.tokens = min(self.tokens, len(token_ids) - 1)
        self.drafts.clear()


@dataclass(slots=True)
class _Run:
    """Tokens of one sequence to compute in one pass."""

    sequence: TokenSequence
    cache: _Cache
    start: int
    """The place of the first of these tokens in the sequence."""
    token_ids: list[int]
    limit: int
    """Drafts wanted in the end; 0: this pass does not reach the sequence's last token."""
    drafts: list[int] = field(default_factory=list)


class DraftModelDrafter:
    """Greedy drafts: k passes of the model over all sequences at once.

    The drafter has a KV pool of its own. Tokens of a sequence that it has not seen (the prompt, after a
    handoff; tokens that came while the sequence paused) it computes first, at most ``budget`` tokens in a
    call for all sequences together; a sequence that has not caught up gets no drafts. Nor does a sequence
    without room, when the blocks of all sequences that do not draft now are taken. With ``replay``, passes
    over a few tokens of each sequence are replayed.
    """

    wants_hidden = False

    def __init__(
        self,
        model: CausalLM,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        budget: int,
        replay: Replay | None = None,
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._device = device
        self._budget = budget
        nobodys = 0 if replay is None else 1
        self._pool = new_kv_pool(model.config, num_blocks + nobodys, block_size, model.dtype, device)
        self._forward: Forward = model.forward if replay is None else replay(model, self._pool)
        self._free = list(reversed(range(num_blocks)))
        self._caches: dict[TokenSequence, _Cache] = {}
        self._with_lengths = model.config.rope.by_length

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    def draft(self, sequences: Sequence[TokenSequence], limits: Sequence[int]) -> list[list[int]]:
        runs = self._plan(sequences, limits)
        drafts = {run.sequence: run.drafts for run in runs}
        with torch.inference_mode():
            if runs:
                self._pass(runs)
            runs = [run for run in runs if run.limit]
            while runs := [self._behind(run) for run in runs if len(run.drafts) < run.limit]:
                self._pass(runs)
        return [drafts.get(sequence, []) for sequence in sequences]

    def observe(self, sequence: TokenSequence, first: int, hidden: Tensor) -> None:
        raise AssertionError("a draft model wants no hidden states")

    def forget(self, sequence: TokenSequence) -> None:
        cache = self._caches.pop(sequence, None)
        if cache is not None:
            self._free += cache.blocks

    # -- what to compute ---------------------------------------------------------------------------------

    def _plan(self, sequences: Sequence[TokenSequence], limits: Sequence[int]) -> list[_Run]:
        """The first pass: the missing tokens of each sequence, as far as budget and blocks go."""
        runs: list[_Run] = []
        budget = self._budget
        drafting = set(sequences)
        for sequence, limit in zip(sequences, limits, strict=True):
            cache = self._caches.setdefault(sequence, _Cache())
            cache.settle(sequence.token_ids)
            limit = min(limit, self._model.config.max_model_len - sequence.num_tokens + 1)
            missing = min(sequence.num_tokens - cache.tokens, budget)
            stop = cache.tokens + missing
            whole = stop == sequence.num_tokens
            # The last draft is never computed here.
            if limit < 1 or not missing or not self._grow(cache, stop + (limit - 1) * whole, drafting):
                continue
            token_ids = sequence.token_ids[cache.tokens : stop].tolist()
            if max(token_ids) >= self._model.config.vocab_size:  # an id of the target's padding
                continue
            runs.append(_Run(sequence, cache, cache.tokens, token_ids, limit if whole else 0))
            budget -= missing
        return runs

    def _behind(self, run: _Run) -> _Run:
        """The pass behind ``run``, over the last draft."""
        last = run.drafts[-1]
        run.cache.drafts.append(last)
        return _Run(run.sequence, run.cache, run.start + len(run.token_ids), [last], run.limit, run.drafts)

    def _grow(self, cache: _Cache, num_tokens: int, drafting: Collection[TokenSequence]) -> bool:
        """Gives a cache blocks for ``num_tokens`` tokens; False if there are not enough."""
        missing = -(-num_tokens // self._block_size) - len(cache.blocks)
        if missing > len(self._free):
            for idle in [sequence for sequence in self._caches if sequence not in drafting]:
                self.forget(idle)
        if missing > len(self._free):
            return False
        cache.blocks += [self._free.pop() for _ in range(missing)]
        return True

    # -- computing it ------------------------------------------------------------------------------------

    def _pass(self, runs: list[_Run]) -> None:
        """Computes the tokens of ``runs``, and adds a draft to each run that reaches its sequence's end."""
        rows = [run for run in runs if len(run.token_ids) <= MAX_ROWS]
        chunks = [run for run in runs if len(run.token_ids) > MAX_ROWS]
        runs = rows + chunks
        token_ids = torch.tensor([token for run in runs for token in run.token_ids], device=self._device)
        hidden = self._forward(token_ids, self._batch(rows, chunks), self._pool)
        ends = np.cumsum([len(run.token_ids) for run in runs])
        drafting = [at for at, run in enumerate(runs) if run.limit]
        if drafting:
            last = torch.from_numpy(ends[drafting] - 1).to(self._device)
            chosen = self._model.logits(hidden[last]).argmax(dim=-1).tolist()
            for at, token in zip(drafting, chosen, strict=True):
                runs[at].drafts.append(token)
        for run in runs:
            if not run.cache.drafts:  # these were tokens of the sequence
                run.cache.tokens = run.start + len(run.token_ids)

    def _batch(self, rows: list[_Run], chunks: list[_Run]) -> PagedBatch:
        runs = rows + chunks
        places = [np.arange(run.start, run.start + len(run.token_ids)) for run in runs]
        blocks = [
            np.array(run.cache.blocks)[place // self._block_size]
            for run, place in zip(runs, places, strict=True)
        ]
        num_rows = sum(len(run.token_ids) for run in rows)
        positions = self._tensor(np.concatenate(places))
        lengths = None
        if self._with_lengths:
            prompts = np.repeat([run.sequence.num_prompt for run in runs], [len(place) for place in places])
            lengths = torch.maximum(self._tensor(prompts), positions + 1)
        return PagedBatch(
            positions=positions,
            slot_blocks=self._tensor(np.concatenate(blocks)),
            slot_offsets=positions % self._block_size,
            num_decode=num_rows,
            decode_tables=self._tables(rows),
            decode_contexts=positions[:num_rows] + 1,
            chunks=self._chunks(num_rows, chunks),
            lengths=lengths,
        )

    def _tables(self, rows: list[_Run]) -> Tensor:
        """Block tables [rows, blocks]: each token of a run has the table of its sequence, and sees the tokens
        before it."""
        width = max((len(run.cache.blocks) for run in rows), default=0)
        tables = np.zeros((len(rows), width), np.int64)
        for table, run in zip(tables, rows, strict=True):
            table[: len(run.cache.blocks)] = run.cache.blocks
        return self._tensor(np.repeat(tables, [len(run.token_ids) for run in rows], axis=0))

    def _chunks(self, start: int, chunks: list[_Run]) -> tuple[Chunk, ...]:
        found = []
        for run in chunks:
            context = run.start + len(run.token_ids)
            table = run.cache.blocks[: -(-context // self._block_size)]
            found.append(Chunk(start, len(run.token_ids), context, self._tensor(np.array(table))))
            start += len(run.token_ids)
        return tuple(found)

    def _tensor(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(values).to(self._device)
