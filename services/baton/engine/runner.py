"""From a scheduled batch to one sampled token for each sequence that is due one, and log-probabilities where
they are asked for."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.beams import Candidates
from baton.engine.execution import Sampled, StepResult
from baton.engine.guidance import Guide, GuidedRow, MaskStage, StepMasks
from baton.engine.logits import LogitRules, Row, adjust
from baton.engine.logprobs import score, score_each
from baton.engine.sampler import sample
from baton.engine.scheduler import ScheduledBatch
from baton.engine.sequence import Sequence
from baton.engine.step import StepTensors, prompt_pieces
from baton.engine.verification import Drafted, verify
from baton.grammar.compiler import Grammar
from baton.logprobs import Logprobs
from baton.parallel.messages import StepLayout
from baton.parallel.ranks import Ranks
from baton.sampling_params import SamplingParams
from baton_kernels.blocks import copy_blocks
from baton_kernels.cpu.library import bind_threads, release_threads
from baton_kernels.paged import PagedBatch


class Model(Protocol):
    """What the engine needs of a model."""

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        """``token_ids`` [T] int64 → hidden states [T, H], or [R, H] of those that ``batch.wanted`` names;
        writes the tokens' K and V into ``pool``."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] → [R, V] float32."""
        ...


@dataclass(frozen=True, slots=True)
class PromptRows:
    """A run of rows that tell the log-probabilities of the prompt tokens behind them."""

    sequence: Sequence
    start: int
    """The first row's index in the step."""
    token_ids: list[int]
    """The prompt token that follows each row."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, laid out for the model and the sampler."""

    layout: StepLayout
    buffer: Tensor
    """On the host: ``StepTensors`` names its parts."""
    due: tuple[Sequence, ...]
    """Sequences whose last token is in the step, so that it yields their next one; without drafts. Their rows
    come first."""
    drafted: tuple[Drafted, ...]
    """Those with drafts behind their last token: one row each, and another for each draft."""
    prompts: tuple[PromptRows, ...] = ()


class ModelRunner:
    """Owns the model and the bytes of the KV pool ([num_blocks, kv_heads, layers, 2, block_size, dim])."""

    def __init__(
        self,
        model: Model,
        pool: Tensor,
        block_size: int,
        device: torch.device,
        *,
        with_lengths: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """``with_lengths``: the model wants ``PagedBatch.lengths``. ``ranks``: the others that the model is
        split over, each with a pool of its own; this is their leader."""
        self.ranks = ranks
        self.keeps_hidden = False
        """Whether steps give their hidden states, for a drafter."""
        self.with_lengths = with_lengths
        self.model = model
        self.pool = pool
        self.block_size = block_size
        self.device = device
        self.masks = MaskStage()

    def run(self, batch: ScheduledBatch) -> StepResult:
        """Computes a step and what it yields. The step's KV is in the pool on return, on every rank."""
        return self.execute(self.prepare(batch))

    @staticmethod
    def rules(
        params: SamplingParams, prompt_ids: Items[int], eos_token_ids: frozenset[int]
    ) -> LogitRules | None:
        """See ``Runner.rules``."""
        return LogitRules.of(params, prompt_ids, eos_token_ids)

    @staticmethod
    def guide(grammar: Grammar, params: SamplingParams, eos_token_ids: frozenset[int]) -> Guide:
        """See ``Runner.guide``."""
        return Guide(grammar, params, eos_token_ids)

    @staticmethod
    def enter() -> None:
        """Binds the threads that compute to cores of their own, where there is one for each."""
        bind_threads()

    @staticmethod
    def leave() -> None:
        """Lets go of them: this thread has loaded the model, or is done."""
        release_threads()

    def execute(self, inputs: StepInputs) -> StepResult:
        """RankError if a rank is dead. Whatever else is raised, an interrupt too, ends the other ranks: they
        may be in the middle of the step."""
        if self.ranks is None:
            return self._execute(inputs)
        try:
            self.ranks.tell(inputs.layout, inputs.buffer.numpy().data)
            result = self._execute(inputs)
            if inputs.layout.reply:
                self.ranks.answers(inputs.layout.reply)
            return result
        except RuntimeError as error:
            cause = self.ranks.cause(error)
            self.ranks.close()
            raise cause from error
        except BaseException:
            self.ranks.close()
            raise

    def _execute(self, inputs: StepInputs) -> StepResult:
        step = StepTensors.of(inputs.layout, inputs.buffer.to(self.device))
        with torch.inference_mode():
            if step.copies is not None:
                sources, targets = step.copies
                copy_blocks(self.pool, targets, self.pool, sources)
            hidden = self.model.forward(step.token_ids, step.batch, self.pool)
            result = StepResult(hidden=hidden if self.keeps_hidden else None)
            for prompt in inputs.prompts:
                result.prompt_logprobs[prompt.sequence] = self._score_prompt(hidden, prompt)
            if inputs.layout.num_rows:
                if step.rows is not None:
                    hidden = hidden[step.rows]
                logits = self.model.logits(hidden)
                result.candidates.update(_candidates(logits, inputs.due))
                self._choose(logits, inputs, result)
            elif self.device.type == "cuda":
                # Fetching sampled tokens waits for the device; without any, wait explicitly: others will
                # read these blocks outside of its stream.
                torch.cuda.current_stream(self.device).synchronize()
            return result

    def _score_prompt(self, hidden: Tensor, prompt: PromptRows) -> Logprobs:
        rows = hidden[prompt.start : prompt.start + len(prompt.token_ids)]
        num_top = prompt.sequence.params.prompt_logprobs or 0
        parts = []
        at = 0
        for piece in prompt_pieces(rows):
            parts.append(score(self.model.logits(piece), prompt.token_ids[at : at + len(piece)], num_top))
            at += len(piece)
        return Logprobs.join(parts)

    def _choose(self, logits: Tensor, inputs: StepInputs, result: StepResult) -> None:
        if inputs.due:
            masks = self.masks.masks(_guided(inputs.due))
            self._sample(logits[: len(inputs.due)], inputs.due, masks, result)
        if inputs.drafted:
            verdict = verify(logits[len(inputs.due) :], inputs.drafted, self.masks)
            result.verified.update(verdict.tokens)
            result.errors.update(verdict.errors)

    @staticmethod
    def _sample(logits: Tensor, due: tuple[Sequence, ...], masks: StepMasks, result: StepResult) -> None:
        """Chooses the next token of each sequence, and of its forks, by its row of ``logits``, which this
        changes."""
        draws = _draws(due)
        if not draws:
            return
        telling = [at for at, draw in enumerate(draws) if draw.params.logprobs is not None]
        raw = logits[[draws[at].row for at in telling]] if telling else None
        masks.apply(logits)
        adjust(logits, [Row(i, s.rules, s.token_ids) for i, s in enumerate(due) if s.rules is not None])
        masks.find_conflicts(logits)
        if [draw.row for draw in draws] != list(range(len(due))):
            logits = logits[torch.tensor([draw.row for draw in draws], device=logits.device)]
        drawn = sample(logits, [draw.params for draw in draws], [due[draw.row].num_outputs for draw in draws])
        tokens = [t if draw.given is None else draw.given for t, draw in zip(drawn, draws, strict=True)]
        told: dict[int, Logprobs] = {}
        if raw is not None:
            num_tops = [draws[at].params.logprobs or 0 for at in telling]
            told = dict(zip(telling, score_each(raw, [tokens[at] for at in telling], num_tops), strict=True))
        for at, (draw, token) in enumerate(zip(draws, tokens, strict=True)):
            result.tokens.setdefault(due[draw.row], []).append(Sampled(token, told.get(at)))
        for row, error in masks.errors.items():
            result.errors[due[row]] = error
            del result.tokens[due[row]]

    def prepare(self, batch: ScheduledBatch) -> StepInputs:
        """Lays a batch out in one int64 buffer, so that a device gets it in one copy. Work per sequence is a
        few array operations; nothing is done per token."""
        singles = [item.sequence for item in batch.items[: batch.num_single]]
        chunks = batch.items[batch.num_single :]
        due, drafted, rows = _due(batch)
        prompts = _prompt_rows(batch)
        owners = [*due, *(seq for seq, drafts in drafted for _ in range(len(drafts) + 1))]
        layout = self._layout(batch, singles, owners, prompts)
        buffer = torch.zeros(sum(layout.sizes), dtype=torch.int64)
        step = StepTensors.of(layout, buffer)
        columns = buffer[: 4 * layout.num_tokens].view(4, layout.num_tokens).numpy()
        tables, contexts = step.batch.decode_tables.numpy(), step.batch.decode_contexts.numpy()
        self._fill_singles(columns[:, : len(singles)], contexts, tables, singles)
        for (seq, _), chunk in zip(chunks, step.batch.chunks, strict=True):
            drafts = batch.drafts.get(seq, ())
            own = columns[:, chunk.start : chunk.start + chunk.length]
            self._fill_chunk(own, chunk.table.numpy(), seq, drafts)
        wanted = step.batch.wanted
        if wanted is not None:
            wanted.rows.numpy()[:] = rows
            _fill_tables(wanted.tables.numpy(), owners)
        elif step.rows is not None:
            step.rows.numpy()[:] = rows
        if step.copies is not None:
            step.copies[0].numpy()[:] = [copy.source for copy in batch.copies]
            step.copies[1].numpy()[:] = [copy.target for copy in batch.copies]
        if step.batch.lengths is not None:
            step.batch.lengths.numpy()[:] = _lengths(batch, columns[1])
        return StepInputs(layout, buffer, due, drafted, prompts)

    def _layout(
        self,
        batch: ScheduledBatch,
        singles: list[Sequence],
        owners: list[Sequence],
        prompts: tuple[PromptRows, ...],
    ) -> StepLayout:
        """``owners``: the sequence of each row whose logits are made."""
        num_rows = len(owners)
        contexts = [(item.num_new, item.sequence.num_computed + item.num_new) for item in batch.items]
        num_tokens = sum(num_new for num_new, _ in contexts)
        narrow = num_rows < num_tokens and not prompts and not self.keeps_hidden
        return StepLayout(
            num_tokens=num_tokens,
            num_decode=len(singles),
            width=_width(singles),
            chunks=tuple(
                (num_new, context, self._blocks_seen(context))
                for num_new, context in contexts[batch.num_single :]
            ),
            num_rows=num_rows,
            narrow=narrow,
            wanted_width=_width(owners) if narrow else 0,
            num_copies=len(batch.copies),
            with_lengths=self.with_lengths,
            prompts=tuple((prompt.start, len(prompt.token_ids)) for prompt in prompts),
            # Logits that come tell that a step is over; without any, the ranks are asked.
            reply=self.ranks.question() if self.ranks is not None and not num_rows else 0,
        )

    def _fill_singles(
        self,
        columns: NDArray[np.int64],
        contexts: NDArray[np.int64],
        tables: NDArray[np.int64],
        singles: list[Sequence],
    ) -> None:
        """Fills [4, n] columns (token, position, block, offset), [n] contexts and [n, width] tables."""
        positions = [seq.num_computed for seq in singles]
        columns[0] = [seq.token_ids[at] for seq, at in zip(singles, positions, strict=True)]
        columns[1] = positions
        contexts[:] = columns[1] + 1
        _fill_tables(tables, singles)
        if singles:
            columns[2] = tables[np.arange(len(singles)), columns[1] // self.block_size]
        columns[3] = columns[1] % self.block_size

    def _fill_chunk(
        self, columns: NDArray[np.int64], table: NDArray[np.int64], seq: Sequence, drafts: Items[int]
    ) -> None:
        """Fills [4, length] columns (token, position, block, offset) and the [blocks] table of one chunk."""
        start, stop = seq.num_computed, seq.num_computed + columns.shape[1]
        table[:] = np.frombuffer(seq.block_ids, dtype=np.int64)[: len(table)]
        own = columns.shape[1] - len(drafts)
        columns[0, :own] = np.frombuffer(seq.token_ids, dtype=np.int64)[start : start + own]
        columns[0, own:] = drafts
        columns[1] = np.arange(start, stop)
        columns[2] = table[columns[1] // self.block_size]
        columns[3] = columns[1] % self.block_size

    def _blocks_seen(self, context: int) -> int:
        return -(-context // self.block_size)


def _width(sequences: Items[Sequence]) -> int:
    return max((len(seq.block_ids) for seq in sequences), default=0)


def _fill_tables(tables: NDArray[np.int64], sequences: Items[Sequence]) -> None:
    """Fills [n, width] tables."""
    for row, seq in enumerate(sequences):
        tables[row, : len(seq.block_ids)] = np.frombuffer(seq.block_ids, dtype=np.int64)


def _guided(due: tuple[Sequence, ...]) -> list[GuidedRow]:
    return [GuidedRow(i, s.guide, s.output_ids) for i, s in enumerate(due) if s.guide is not None]


def _lengths(batch: ScheduledBatch, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """[T]: see ``PagedBatch.lengths``."""
    prompts = np.repeat([seq.num_prompt for seq, _ in batch.items], [num_new for _, num_new in batch.items])
    longest: NDArray[np.int64] = np.maximum(prompts, positions + 1)
    return longest


def _due(batch: ScheduledBatch) -> tuple[tuple[Sequence, ...], tuple[Drafted, ...], list[int]]:
    """The sequences that reach their last token in this step, those that have drafts behind it, and the rows
    of these tokens and drafts."""
    due: list[Sequence] = []
    drafted: list[Drafted] = []
    rows: list[int] = []
    rows_drafted: list[int] = []
    end = 0
    for seq, num_new in batch.items:
        end += num_new
        drafts = batch.drafts.get(seq)
        if drafts:
            drafted.append(Drafted(seq, drafts))
            rows_drafted += range(end - num_new, end)
        elif seq.num_uncomputed == num_new:
            due.append(seq)
            rows.append(end - 1)
    return tuple(due), tuple(drafted), rows + rows_drafted


class _Draw(NamedTuple):
    """A token to be chosen."""

    row: int
    """Of the sequence among those due."""
    params: SamplingParams
    given: int | None = None
    """The choice, where it was made before."""


def _draws(due: tuple[Sequence, ...]) -> list[_Draw]:
    """What to choose after each sequence: one token, and at its first output one for each of its forks.
    Nothing after a beam."""
    draws: list[_Draw] = []
    for row, seq in enumerate(due):
        if seq.num_candidates:
            continue
        if seq.output_ids or not seq.forks:
            draws.append(_Draw(row, seq.params))
            continue
        draws.append(_Draw(row, seq.params, seq.first_token))
        draws += [_Draw(row, fork.params, fork.first_token) for fork in seq.forks]
    return draws


def _prompt_rows(batch: ScheduledBatch) -> tuple[PromptRows, ...]:
    """The rows of the step after which a prompt token's log-probability is asked for and not known yet."""
    found = []
    end = 0
    for seq, num_new in batch.items:
        end += num_new
        if seq.scores_prompt:
            stop = min(seq.num_computed + num_new, seq.num_prompt - 1)
            first = max(seq.num_computed, seq.num_scored)
            if first < stop:
                start = end - num_new + first - seq.num_computed
                found.append(PromptRows(seq, start, list(seq.prompt_ids[first + 1 : stop + 1])))
    return tuple(found)


def _candidates(logits: Tensor, due: tuple[Sequence, ...]) -> dict[Sequence, Candidates]:
    """The likeliest tokens after the beams among those due, by their rows of ``logits``."""
    by_count: dict[int, list[int]] = {}
    for row, seq in enumerate(due):
        if seq.num_candidates:
            by_count.setdefault(seq.num_candidates, []).append(row)
    found: dict[Sequence, Candidates] = {}
    # Each count by itself: which of equal tokens come first must not hang on who else is in the batch.
    for count, rows in by_count.items():
        top = logits[rows].log_softmax(dim=-1).topk(min(count, logits.shape[-1]), dim=-1)
        for row, ids, logprobs in zip(rows, top.indices.tolist(), top.values.tolist(), strict=True):
            found[due[row]] = Candidates(ids, logprobs)
    return found
