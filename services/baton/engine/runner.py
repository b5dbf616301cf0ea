"""The model runner: computes a scheduled batch, one sampled token for each sequence that is due one, and
log-probabilities where they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from concurrent.futures import Future
from types import MappingProxyType

import torch
from torch import Tensor

from baton.core.logprobs import Logprobs
from baton.core.sampling_params import ResolvedSampling
from baton.engine.device import enter_device
from baton.engine.execution import Launcher, StepResult
from baton.engine.graphs import GraphedModel
from baton.engine.model import Model
from baton.engine.sampling.bad_words import BadWords
from baton.engine.sampling.guidance import Guide, MaskStage
from baton.engine.sampling.logits import LogitRules
from baton.engine.sampling.logprobs import TokenScores, begin_score
from baton.engine.sampling.sampler import Packer
from baton.engine.scheduler import ScheduledBatch
from baton.engine.sequence import Sequence
from baton.engine.step import StepTensors, prompt_pieces
from baton.engine.step_inputs import PromptRows, StepBuilder, StepInputs
from baton.engine.token_choice import TokenChoice
from baton.engine.verification import verify
from baton.grammar.table import Grammar
from baton.parallel.ranks import Ranks
from baton_kernels.blocks import copy_blocks
from baton_kernels.cpu.library import bind_threads, release_threads
from baton_kernels.kv_fp8 import KVScales
from baton_kernels.kv_layout import KVLayout
from baton_kernels.transfers import to_device

NO_PLACES: Mapping[Sequence, int] = MappingProxyType({})


class LaunchedStep:
    """``baton.engine.execution.PendingStep`` of a model whose forward pass has been launched."""

    def __init__(
        self,
        inputs: StepInputs,
        masks: MaskStage,
        packer: Packer,
        hidden: Tensor | None,
        logits: Tensor | None,
        prompt_scores: list[tuple[Sequence, list[TokenScores]]],
        device: torch.device,
    ) -> None:
        """``hidden``: the hidden states, if a drafter wants them. ``logits``: [rows, V]; None: no row."""
        self.inputs = inputs
        self.choice: TokenChoice | None = None
        self._masks = masks
        self._packer = packer
        self._logits = logits
        self._prompt_scores = prompt_scores
        self._result = StepResult(hidden=hidden)
        self._device = device
        self._over: torch.cuda.Event | None = None

    @torch.inference_mode()
    def choose(self) -> None:
        due, drafted, logits = self.inputs.due, self.inputs.drafted, self._logits
        self._logits = None
        if logits is not None and due:
            self.choice = TokenChoice(due, logits[: len(due)], self._masks, self._packer)
        if logits is not None and drafted:
            verdict = verify(logits[len(due) :], drafted, self._masks)
            self._result.verified.update(verdict.tokens)
            self._result.errors.update(verdict.errors)
        if self._device.type == "cuda":
            self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._over.record(torch.cuda.current_stream(self._device))

    def result(self) -> StepResult:
        # The step's blocks will be read outside of its stream: wait even where it yields no token.
        if self._over is not None:
            self._over.synchronize()
        for sequence, parts in self._prompt_scores:
            self._result.prompt_logprobs[sequence] = Logprobs.join([part.read() for part in parts])
        if self.choice is not None:
            self.choice.read(self._result)
        return self._result


class ModelRunner:
    """Owns the model and the bytes of the KV pool (``baton.models.loader.new_page_pool``)."""

    def __init__(
        self,
        model: Model,
        pool: Tensor,
        block_size: int,
        device: torch.device,
        *,
        with_lengths: bool = False,
        ranks: Ranks | None = None,
        layout: KVLayout | None = None,
        kv_scales: Mapping[int, KVScales] | None = None,
    ) -> None:
        """``with_lengths``: the model wants ``PagedBatch.lengths``. ``ranks``: the other ranks that the model
        is split over, each with a pool of its own; this is their leader. ``layout``: of the pool's pages;
        None: a page is a block of all layers. ``kv_scales``: of this rank's layers in FP8; None: all
        are 1."""
        self.ranks = ranks
        self.kv_scales = kv_scales or {}
        self.keeps_hidden = False
        """Whether steps give their hidden states, for a drafter."""
        self.launcher: Launcher | None = None
        self._builder = StepBuilder(block_size, device, with_lengths, layout)
        self._newest: LaunchedStep | None = None
        """The step that was launched last."""
        self.model = model
        self.pool = pool
        self.layout = layout or KVLayout.of_one(block_size)
        self.block_size = block_size
        self.device = device
        self.masks = MaskStage()
        self._packer = Packer()

    def replay(self, model: GraphedModel) -> None:
        """Computes by ``model`` from here on, with drafts laid out as it replays them."""
        self.model = model
        self._builder.draft_rows = model.draft_rows

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """See ``baton.engine.execution.Launcher``. Only without other ranks."""
        newest = self._newest
        chosen = newest.choice if newest is not None else None
        self._newest = self.start(self.prepare(batch, {} if chosen is None else chosen.places), chosen)
        return self._newest

    def run(self, batch: ScheduledBatch) -> StepResult:
        """Computes a step and its results. The step's KV is in the pool on return, on every rank."""
        return self.execute(self.prepare(batch))

    def prepare(self, batch: ScheduledBatch, places: Mapping[Sequence, int] = NO_PLACES) -> StepInputs:
        """Lays a batch out. ``places``: where the step before chooses the tokens that are not here yet."""
        question = 0
        if self.ranks is not None and not any(item.chooses for item in batch.items):
            question = self.ranks.question()
        return self._builder.build(batch, places, self.keeps_hidden, question)

    def execute(self, inputs: StepInputs) -> StepResult:
        """Computes the step on every rank. RankError if a rank is dead. Any other exception, an interrupt
        too, ends the other ranks: they may be in the middle of the step."""
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
        step = self.start(inputs, None)
        step.choose()
        return step.result()

    @torch.inference_mode()
    def start(self, inputs: StepInputs, chosen: TokenChoice | None) -> LaunchedStep:
        """Launches a step's forward pass on this rank. ``chosen``: the choice of the step before, if some of
        its tokens are pending."""
        step = StepTensors.of(inputs.layout, to_device(inputs.buffer, self.device))
        if step.pending is not None:
            assert chosen is not None and chosen.tokens is not None
            columns, places = step.pending
            step.token_ids.index_copy_(0, columns, chosen.tokens[places])
        if step.copies is not None:
            sources, targets = step.copies
            copy_blocks(self.pool, targets, self.pool, sources)
        hidden = self.model.forward(step.token_ids, step.batch, self.pool)
        scores = [(prompt.sequence, self._score_prompt(hidden, prompt)) for prompt in inputs.prompts]
        logits = None
        if inputs.layout.num_rows:
            wanted = hidden if step.rows is None else hidden[step.rows]
            logits = self.model.logits(wanted)
            if step.batch.decode_queries > 1:  # without the padding
                hidden = wanted
        kept = hidden if self.keeps_hidden else None
        return LaunchedStep(inputs, self.masks, self._packer, kept, logits, scores, self.device)

    def _score_prompt(self, hidden: Tensor, prompt: PromptRows) -> list[TokenScores]:
        rows = hidden[prompt.start : prompt.start + len(prompt.token_ids)]
        num_top = prompt.sequence.params.prompt_logprobs or 0
        tokens = to_device(torch.tensor(prompt.token_ids), self.device)
        parts, at = [], 0
        for piece in prompt_pieces(rows):
            parts.append(begin_score(self.model.logits(piece), tokens[at : at + len(piece)], num_top))
            at += len(piece)
        return parts

    @staticmethod
    def rules(
        params: ResolvedSampling,
        prompt_ids: Items[int],
        eos_token_ids: frozenset[int],
        bad_words: Future[BadWords] | None = None,
    ) -> LogitRules | None:
        """See ``Runner.rules``."""
        return LogitRules.of(params, prompt_ids, eos_token_ids, bad_words)

    @staticmethod
    def guide(grammar: Grammar, params: ResolvedSampling, eos_token_ids: frozenset[int]) -> Guide:
        """See ``Runner.guide``."""
        return Guide(grammar, params, eos_token_ids)

    def enter(self) -> None:
        """Has the calling thread compute on this device. On a CPU, binds the threads that compute to cores of
        their own, where there is one for each."""
        enter_device(self.device)
        if self.device.type == "cpu":
            bind_threads()

    def leave(self) -> None:
        """On a CPU, releases these threads: the calling thread has loaded the model, or is done."""
        if self.device.type == "cpu":
            release_threads()
