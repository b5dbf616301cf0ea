"""A model over a paged pool without an engine: steps as a test says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.models.base import CausalLM
from baton.models.loader import new_kv_pool
from baton_kernels.paged import Chunk, PagedBatch, WantedRows
from tests.support.tiny_models import VOCAB_SIZE

BLOCK_SIZE = 16


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


class Ring:
    """The least of an engine: sequences in shuffled blocks of one pool, stepped as the test says."""

    def __init__(self, model: CausalLM, num_blocks: int = 80) -> None:
        self.model = model
        self.pool = new_kv_pool(model.config, num_blocks, BLOCK_SIZE, model.dtype, "cpu", model.shard)
        self.free = list(range(1, num_blocks))
        random.Random(1).shuffle(self.free)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.prompt_length = 0
        """Of every sequence, for the models whose rotary angles depend on it."""

    def step(
        self, decode: Sequence[tuple[str, int]] = (), chunks: Sequence[tuple[str, list[int]]] = ()
    ) -> dict[str, Tensor]:
        """Run one token of each sequence in ``decode`` and the runs in ``chunks``; the logits of all."""
        runs = [(name, [token]) for name, token in decode] + list(chunks)
        for name, tokens in runs:
            self._grow(name, len(tokens))
        with torch.inference_mode():
            ids = torch.tensor([token for _, tokens in runs for token in tokens])
            hidden = self.model(ids, self._batch(runs, len(decode)), self.pool)
            logits = torch.split(self.model.logits(hidden), [len(tokens) for _, tokens in runs])
        return {name: rows for (name, _), rows in zip(runs, logits, strict=True)}

    def step_wanted(self, chunks: Sequence[tuple[str, list[int]]], wanted: Sequence[str]) -> list[Tensor]:
        """Runs these and yields the logits behind the last token of those named, in that order, alone."""
        for name, tokens in chunks:
            self._grow(name, len(tokens))
        batch = self._batch(chunks, 0)
        last = {
            name: chunk.start + chunk.length - 1
            for (name, _), chunk in zip(chunks, batch.chunks, strict=True)
        }
        width = max((len(self.tables[name]) for name in wanted), default=0)
        tables = [self.tables[name] + [0] * (width - len(self.tables[name])) for name in wanted]
        rows = torch.tensor([last[name] for name in wanted], dtype=torch.int64)
        named = WantedRows(rows, torch.tensor(tables, dtype=torch.int64).view(len(wanted), width))
        with torch.inference_mode():
            ids = torch.tensor([token for _, tokens in chunks for token in tokens])
            hidden = self.model(ids, replace(batch, wanted=named), self.pool)
            assert hidden.shape[0] == len(wanted)
            return list(self.model.logits(hidden))

    def greedy(self, prompts: dict[str, list[int]], n: int) -> dict[str, list[int]]:
        """n tokens for each prompt; prompts join one step after another, so that steps are mixed."""
        answers: dict[str, list[int]] = {}
        waiting = list(prompts.items())
        while waiting or any(len(answer) < n for answer in answers.values()):
            running = [(name, answer[-1]) for name, answer in answers.items() if len(answer) < n]
            joining = [waiting.pop(0)] if waiting else []
            for name, logits in self.step(running, joining).items():
                answers.setdefault(name, []).append(int(logits[-1].argmax()))
        return answers

    def _grow(self, name: str, tokens: int) -> None:
        length = self.lengths.get(name, 0) + tokens
        table = self.tables.setdefault(name, [])
        while len(table) * BLOCK_SIZE < length:
            table.append(self.free.pop())
        self.lengths[name] = length

    def _batch(self, runs: Sequence[tuple[str, list[int]]], num_decode: int) -> PagedBatch:
        positions: list[int] = []
        blocks: list[int] = []
        chunks: list[Chunk] = []
        for index, (name, tokens) in enumerate(runs):
            start, length = len(positions), self.lengths[name]
            positions += range(length - len(tokens), length)
            blocks += [self.tables[name][p // BLOCK_SIZE] for p in positions[start:]]
            if index >= num_decode:
                chunks.append(Chunk(start, len(tokens), length, torch.tensor(self.tables[name])))
        decoding = [name for name, _ in runs[:num_decode]]
        width = max((len(self.tables[name]) for name in decoding), default=0)
        tables = [self.tables[name] + [0] * (width - len(self.tables[name])) for name in decoding]
        return PagedBatch(
            positions=torch.tensor(positions),
            lengths=(torch.tensor(positions) + 1).clamp(min=self.prompt_length),
            slot_blocks=torch.tensor(blocks),
            slot_offsets=torch.tensor(positions) % BLOCK_SIZE,
            num_decode=num_decode,
            decode_tables=torch.tensor(tables, dtype=torch.int64).view(num_decode, width),
            decode_contexts=torch.tensor([self.lengths[name] for name in decoding], dtype=torch.int64),
            chunks=tuple(chunks),
        )
