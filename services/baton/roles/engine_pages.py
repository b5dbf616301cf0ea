"""An engine's KV memory as the roles need it, group by group."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from baton.engine.engine import Engine
from baton.engine.kv.arriving import Arriving
from baton.engine.sampling.beams import Candidates
from baton.engine.sequence import Sequence
from baton_kernels.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class KeptPages:
    """The pages of a sequence that is here."""

    tables: Many[Many[int]]
    """The page tables of all token groups."""
    state_pages: Many[int]
    num_gone: Many[int]
    """The number of blocks of each group, at the sequence's beginning, whose pages were given back."""


class EnginePages(Protocol):
    """What the roles ask of an engine's memory. The caller holds the engine's lock."""

    @property
    def layout(self) -> KVLayout: ...

    def fits(self, num_tokens: int) -> bool:
        """Return whether a sequence of so many tokens could ever run here."""

    def reserve(self, num_tokens: int, turn: float) -> bool:
        """Promise room in all groups for a sequence of so many tokens; False if there is none now."""

    def unreserve(self, num_tokens: int) -> None:
        """Take a promise back."""

    def bind_arriving(self, seq: Sequence) -> Arriving | None:
        """Bind what a token behind the sequence's tokens needs: shared pages where a group's prefix cache has
        them, fresh ones elsewhere, with a reference on each. None: no room at this moment."""

    def pin(self, pages: Many[int]) -> None:
        """Keep held pages from being reused, whatever happens to their references."""

    def unpin(self, pages: Many[int]) -> None: ...

    def free_pages(self, pages: Many[int]) -> None:
        """Release one reference on each page."""

    def kept(self, seq: Sequence) -> KeptPages: ...

    def admit_forked(self, answers: list[Sequence], arriving: Arriving) -> dict[Sequence, str]:
        """Join the answers of a request that has arrived, as ``Engine.admit_forked`` does, and take over one
        reference on each page. Full blocks enter the prefix index, but for ``ArrivingGroup.partial`` ones."""

    def admit_beams(self, seq: Sequence, candidates: Candidates, arriving: Arriving) -> None:
        """Begin a beam search, as ``Engine.admit_beams`` does, and take over one reference on each page."""


class PagesOfEngine:
    """``EnginePages`` over an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.layout = engine.layout

    def fits(self, num_tokens: int) -> bool:
        return self._engine.scheduler.counts.computed(num_tokens) <= self._engine.pool.num_blocks

    def reserve(self, num_tokens: int, turn: float) -> bool:
        return self._engine.reserve(num_tokens, turn)

    def unreserve(self, num_tokens: int) -> None:
        self._engine.unreserve(num_tokens)

    def bind_arriving(self, seq: Sequence) -> Arriving | None:
        return self._engine.bind_arriving(seq)

    def pin(self, pages: Many[int]) -> None:
        self._engine.pool.pin(pages)

    def unpin(self, pages: Many[int]) -> None:
        self._engine.pool.unpin(pages)

    def free_pages(self, pages: Many[int]) -> None:
        self._engine.free_pages(pages)

    def kept(self, seq: Sequence) -> KeptPages:
        gone = tuple(seq.num_gone(number) for number in range(len(self.layout.groups)))
        return KeptPages(seq.tables, seq.state_pages, gone)

    def admit_forked(self, answers: list[Sequence], arriving: Arriving) -> dict[Sequence, str]:
        return self._engine.admit_forked(answers, arriving)

    def admit_beams(self, seq: Sequence, candidates: Candidates, arriving: Arriving) -> None:
        self._engine.admit_beams(seq, candidates, arriving)
