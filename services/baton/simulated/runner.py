"""Steps of a model that is a hash: its next token follows from every token before it, read from the pool.

The KV of a token is one 64-bit word, a digest of all tokens up to it, made from the previous token's word as
the pool holds it. A block that was given away too early, sent wrongly or bound in the wrong order changes all
tokens after it, as it would with a real model.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from baton.core.sampling_params import ResolvedSampling
from baton.engine.execution import Launcher, Sampled, StepResult
from baton.engine.sampling.bad_words import BadWords
from baton.engine.scheduler import Scheduled, ScheduledBatch
from baton.engine.sequence import Sequence
from baton.grammar.table import Grammar
from baton.simulated.faults import Faults
from baton.simulated.profile import Profile
from baton.simulated.record import TokenLog

if TYPE_CHECKING:
    from baton.engine.sampling.guidance import Guide
    from baton.parallel.ranks import Ranks

Words = NDArray[np.uint64]

FACTOR = 0x5851F42D4C957F2D  # odd: multiplying by it loses nothing
_MASK = (1 << 64) - 1


class SimulatedRunner:
    """``baton.engine.execution.Runner`` over a pool of words, [num_blocks, block_size]."""

    def __init__(
        self,
        profile: Profile,
        num_blocks: int,
        block_size: int,
        vocabulary: range,
        eos_token_ids: frozenset[int],
        faults: Faults | None = None,
        record: TokenLog | None = None,
        revision: str | None = None,
    ) -> None:
        """``vocabulary``: the ids that answers are made of. ``record`` gets every token. ``revision``: the
        revision of weights other than the model files'; None: the files' own."""
        self.ranks: Ranks | None = None
        self.launcher: Launcher | None = None
        self.keeps_hidden = False
        self.pool: Words = np.zeros((num_blocks, block_size), np.uint64)
        self._profile = profile
        self._block_size = block_size
        self._vocabulary = vocabulary
        self._eos = sorted(eos_token_ids)
        self._faults = faults or Faults()
        self._record = record
        self._salt = salt_of(revision)

    def run(self, batch: ScheduledBatch) -> StepResult:
        began = time.monotonic()
        for copy in batch.copies:
            self.pool[copy.target] = self.pool[copy.source]
        result = StepResult()
        for item in batch.items:
            self._compute(item)
            seq = item.sequence
            if not item.chooses:
                continue
            error = self._faults.error()
            if error is not None:
                result.errors[seq] = error
            else:
                result.tokens[seq] = list(self._sample(seq))
        wait = began + self._seconds(batch) - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        if self._record is not None:
            self._record.step(result)
        return result

    def _seconds(self, batch: ScheduledBatch) -> float:
        context = sum(item.start for item in batch.items[: batch.num_single])
        prompt_tokens = sum(item.num_new for item in batch.items[batch.num_single :])
        return self._faults.stretched(self._profile.step_s(batch.num_single, context, prompt_tokens))

    def _compute(self, item: Scheduled) -> None:
        """Write the words of the new tokens: each is the previous word times FACTOR, plus the token's id."""
        seq, num_new, start, _ = item
        size, pool = self._block_size, self.pool
        word = word_before_all(self._salt)
        if start:
            word = int(pool[seq.block_ids[(start - 1) // size], (start - 1) % size])
        if num_new == 1:
            word = (word * FACTOR + seq.token_ids[start] + 1) & _MASK
            pool[seq.block_ids[start // size], start % size] = word
            return
        places = np.arange(start, start + num_new)
        blocks = np.array(seq.block_ids, np.int64)[places // size]
        pool[blocks, places % size] = chained(word, seq.token_ids[start : start + num_new])

    def _sample(self, seq: Sequence) -> Iterator[Sampled]:
        """Yield the next token; with the first one, also the first tokens of the forks."""
        last = seq.num_tokens - 1
        word = int(self.pool[seq.block_ids[last // self._block_size], last % self._block_size])
        if seq.output_ids or not seq.forks:
            yield Sampled(self._token(word, seq.params), None)
            return
        answers = [(seq.params, seq.first_token), *((fork.params, fork.first_token) for fork in seq.forks)]
        for params, given in answers:
            yield Sampled(self._token(word, params) if given is None else given, None)

    def _token(self, word: int, params: ResolvedSampling) -> int:
        drawn = mixed(word ^ mixed(params.seed if params.temperature else 0) ^ self._salt)
        mean = self._profile.mean_output_tokens
        if mean and self._eos and not params.ignore_eos and (drawn >> 32) % 2**20 < 2**20 / mean:
            return self._eos[0]
        return self._vocabulary[drawn % len(self._vocabulary)]

    # --- what it does not support

    @staticmethod
    def rules(
        params: ResolvedSampling,
        prompt_ids: Items[int],
        eos_token_ids: frozenset[int],
        bad_words: Future[BadWords] | None = None,
    ) -> None:
        """Check that ``params`` need no logits, which a simulated worker does not have. Raises ValueError for
        parameters that do."""
        wanted = ("logprobs", "prompt_logprobs", "beam_search")
        for name in wanted:
            if getattr(params, name) is not None:
                raise ValueError(f"{name}: a simulated worker has no log-probabilities")

    @staticmethod
    def guide(grammar: Grammar, params: ResolvedSampling, eos_token_ids: frozenset[int]) -> Guide:
        return _no_grammars()

    @staticmethod
    def enter() -> None: ...

    @staticmethod
    def leave() -> None: ...


def _no_grammars() -> NoReturn:
    raise ValueError("a simulated worker cannot guide outputs")


def salt_of(revision: str | None) -> int:
    """Return the salt that makes the KV and the tokens of one revision differ from another's."""
    if revision is None:
        return 0
    return int.from_bytes(hashlib.blake2b(revision.encode(), digest_size=8).digest(), "little")


def word_before_all(salt: int) -> int:
    """Return the word before the first token."""
    return salt ^ 1


def chained(word: int, token_ids: Items[int]) -> Words:
    """Return the words of the tokens that follow the token of ``word``, all at once.

    With w(i) = w(i - 1) * F + t(i) modulo 2 ** 64 and F odd, w(i) / F ** i is a running sum.
    """
    count = len(token_ids)
    powers = _powers(FACTOR, count)
    inverses = _powers(pow(FACTOR, -1, 1 << 64), count)
    terms = (np.asarray(token_ids).astype(np.uint64) + np.uint64(1)) * inverses
    words: Words = (np.cumsum(terms, dtype=np.uint64) + np.uint64(word)) * powers
    return words


def _powers(factor: int, count: int) -> Words:
    """Return the first ``count`` powers of ``factor``, from 1 on, modulo 2 ** 64."""
    return np.cumprod(np.full(count, factor, np.uint64), dtype=np.uint64)


def mixed(word: int) -> int:
    """Apply the finalizer of SplitMix64 (https://doi.org/10.1145/2660193.2660195): every bit of the result
    depends on every bit of ``word``."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
