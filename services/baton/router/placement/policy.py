"""The choice of the prefill worker that computes a prompt and the decode worker that answers it, or of one
worker for both, by the estimated cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from types import MappingProxyType
from typing import NamedTuple

from baton.core.role import Role
from baton.router.placement.estimate import BEYOND_S, Estimate
from baton.router.placement.options import HANDOFF_S, PlacementOptions

MAX_PAIRED = 3
"""Most workers of each role that are compared in pairs: those of least cost by themselves. A pair adds only
the transfer, and how much of it the computing hides."""
TICK_S = 0.001
"""The difference below which two estimates count as equal, in seconds."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to place."""

    num_tokens: int
    """Tokens of the prompt, and of the answer so far if it continues on another worker."""
    cached: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Worker → leading tokens that its prefix cache has; 0 for workers not named."""


class Choice(NamedTuple):
    """The workers of a request. Without ``prefill`` the decode worker computes the prompt as well."""

    decode: str
    prefill: str | None = None


class Candidate(NamedTuple):
    """One way to answer, with its estimates in seconds."""

    decode: str
    prefill: str | None
    cached: int
    """Prompt tokens that need not be computed."""
    queue_s: float
    compute_s: float
    handoff_s: float
    """The part of the transfer that the computing does not hide, plus ``HANDOFF_S``."""
    wait_s: float
    """The wait at decode until the answer may run and its KV has room."""
    itl_s: float
    """The time of a decode step with this answer, or of one that computes the prompt if decode does that."""
    stream_s: float
    harm_s: float
    cost_s: float
    """The cost that the choice minimises: TTFT, the answer's steps, and the delay that both cause others."""

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.compute_s + self.handoff_s + self.wait_s

    def __str__(self) -> str:
        where = self.decode if self.prefill is None else f"{self.prefill} > {self.decode}"
        ms = (self.ttft_s, self.queue_s, self.compute_s, self.handoff_s, self.wait_s)
        ttft, queue, compute, handoff, wait = (f"{1e3 * seconds:.0f}" for seconds in ms)
        return (
            f"{where}: cost {1e3 * self.cost_s:.0f} ms, ttft {ttft} = queue {queue} + compute {compute} + "
            f"handoff {handoff} + wait {wait}, cached {self.cached}, itl {1e3 * self.itl_s:.1f}, "
            f"stream {1e3 * self.stream_s:.0f}, harm {1e3 * self.harm_s:.0f}"
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice, with the candidates that it was made from."""

    prompt: Prompt
    chosen: Candidate
    considered: tuple[Candidate, ...]
    """The candidates that were compared, with the chosen one."""

    @property
    def choice(self) -> Choice:
        return Choice(self.chosen.decode, self.chosen.prefill)

    def __str__(self) -> str:
        others = "; ".join(str(other) for other in self.considered if other is not self.chosen)
        return f"{self.prompt.num_tokens} tokens at {self.chosen}" + (f" (not {others})" if others else "")


def choose(prompt: Prompt, workers: Iterable[Estimate], options: PlacementOptions) -> Decision | None:
    """Return the decision of least cost; None if no worker can answer, or may.

    Only workers that accept are compared. A ``both`` worker answers what it computes; a ``decode`` worker
    computes a prompt itself where ``options`` allows it, which also say what is done without prefill workers.
    Among equals the worker with the fewest sequences wins, then the one that was given nothing for longest.
    """
    found: list[_Found] = []
    groups = _groups(workers)
    for group in groups:
        found += _candidates(prompt, group, options)
    if len(groups) > 1 and options.disaggregation != "never":
        found = _paired_first(found)
    if not found:
        return None
    least = min([entry.rank_s for entry in found]) + TICK_S
    close = [entry for entry in found if entry.rank_s <= least]
    chosen = close[0] if len(close) == 1 else min(close, key=_turns)
    return Decision(prompt, chosen.candidate, tuple([entry.candidate for entry in found]))


@dataclass(slots=True)
class _Group:
    """Workers that may be paired."""

    of_role: dict[Role, list[Estimate]] = field(
        default_factory=lambda: {"prefill": [], "decode": [], "both": []}
    )
    guests: list[Estimate] = field(default_factory=list)
    """Decode workers of other groups that take over from these prefill workers."""
    fed: list[Estimate] = field(default_factory=list)
    """Decode workers of this group that are guests of others."""
    all_linked: bool = True
    """Whether every decode worker and every guest can be linked to every prefill worker."""


class _Found(NamedTuple):
    rank_s: float
    candidate: Candidate
    decode: Estimate
    prefill: Estimate


def _paired_first(found: list[_Found]) -> list[_Found]:
    """Rank decode workers of a release without prefill workers last, if another release has pairs: while
    decode is rolled out, one worker of the new release must not get the requests of all. The order stays if
    no paired worker can take the answer without a wait."""
    paired = {entry.decode.group for entry in found if entry.candidate.prefill}
    if not any(entry.decode.group in paired and not entry.candidate.wait_s for entry in found):
        return found
    return [
        entry._replace(rank_s=entry.rank_s + BEYOND_S)
        if entry.decode.role == "decode" and entry.decode.group not in paired
        else entry
        for entry in found
    ]


def _groups(workers: Iterable[Estimate]) -> Collection[_Group]:
    """Group the workers that accept."""
    groups: defaultdict[str, _Group] = defaultdict(_Group)
    converting: list[Estimate] = []
    for worker in workers:
        if worker.accepts:
            group = groups[worker.group]
            group.of_role[worker.role].append(worker)
            if worker.verifies or worker.unlinked:
                group.all_linked = False
            if worker.takes_from and worker.role == "decode":
                converting.append(worker)
    for worker in converting:
        hosts = [groups[name] for name in worker.takes_from if name in groups]
        hosts = [host for host in hosts if _feeds(host.of_role["prefill"], worker)]
        for host in hosts:
            host.guests.append(worker)
            host.all_linked = host.all_linked and not worker.unlinked
        if hosts:
            groups[worker.group].fed.append(worker)
    return groups.values()


def _linkable(prefill: Estimate, decode: Estimate) -> bool:
    converted = prefill.group != decode.group
    return not (prefill.address in decode.unlinked or (converted and prefill.verifies))


def _feeds(prefills: Sequence[Estimate], decode: Estimate) -> bool:
    """Return whether one of the prefill workers can be linked to ``decode``."""
    return any(_linkable(prefill, decode) for prefill in prefills)


def _turns(found: _Found) -> tuple[int | float | str, ...]:
    return (*_turn(found.decode), *_turn(found.prefill))


def _turn(worker: Estimate) -> tuple[int, float, str]:
    return worker.report.sequences, worker.report.last_given_s, worker.address


def _candidates(prompt: Prompt, group: _Group, options: PlacementOptions) -> Iterator[_Found]:
    prefills, decodes = group.of_role["prefill"], group.of_role["decode"]
    alone = group.of_role["both"] + _local_decodes(group, options)
    for worker in _least(alone, _local_costs(prompt, alone)):
        candidate = _local(prompt, worker)
        yield _Found(candidate.cost_s + worker.penalty_s, candidate, worker, worker)
    if prefills and options.disaggregation != "never":
        decodes = decodes + group.guests
        if not group.all_linked:
            decodes = [decode for decode in decodes if _feeds(prefills, decode)]
        best = _least(prefills, _prefill_costs(prompt, prefills))
        for decode in _least(decodes, _decode_costs(prompt, decodes)):
            if not group.all_linked:
                linked = [prefill for prefill in prefills if _linkable(prefill, decode)]
                best = _least(linked, _prefill_costs(prompt, linked))
            for prefill in best:
                candidate = _pair(prompt, prefill, decode)
                yield _Found(candidate.cost_s + decode.penalty_s, candidate, decode, prefill)


def _local_decodes(group: _Group, options: PlacementOptions) -> list[Estimate]:
    """Return the decode workers of a group that may compute prompts themselves."""
    decodes = group.of_role["decode"]
    if options.disaggregation == "never":
        return decodes
    fed = _fed(group)
    local: list[Estimate] = []
    if options.disaggregation == "conditional":
        local += [worker for worker in fed if worker.takes_local]
    kept_apart = options.disaggregation == "always" and fed and group.of_role["prefill"]
    if options.no_prefill == "local" and len(fed) < len(decodes) and not kept_apart:
        local += [worker for worker in decodes if worker not in fed]
    return local


def _fed(group: _Group) -> list[Estimate]:
    """Return the decode workers of a group that a prefill worker hands over to."""
    prefills, decodes = group.of_role["prefill"], group.of_role["decode"]
    if not prefills:
        return group.fed
    if group.all_linked:
        return decodes
    return [decode for decode in decodes if decode in group.fed or _feeds(prefills, decode)]


def _least(workers: Sequence[Estimate], costs: Sequence[float]) -> Sequence[Estimate]:
    """The ``MAX_PAIRED`` workers of least cost, equals in turn."""
    if len(workers) <= MAX_PAIRED:
        return workers
    bound = nsmallest(MAX_PAIRED, costs)[-1] + TICK_S
    close = [(cost, worker) for cost, worker in zip(costs, workers, strict=True) if cost <= bound]
    if len(close) > MAX_PAIRED:
        close.sort(key=lambda entry: (round(entry[0] / TICK_S), *_turn(entry[1])))
    return [worker for _, worker in close[:MAX_PAIRED]]


# The costs of one role without the other. Each request loops over all workers here: keep the loops free of
# calls.


def _prefill_costs(prompt: Prompt, workers: Sequence[Estimate]) -> list[float]:
    num_tokens, cached = prompt.num_tokens, prompt.cached.get
    return [w.queue_s + (num_tokens - cached(w.address, 0)) * w.token_s for w in workers]


def _decode_costs(prompt: Prompt, workers: Sequence[Estimate]) -> list[float]:
    """Return the costs at decode as if the computing hid nothing of the transfer."""
    num_tokens, cached = prompt.num_tokens, prompt.cached.get
    return [
        w.decode_s
        + (num_tokens - cached(w.address, 0)) * w.kv_token_s
        + (w.missing_s * (num_tokens - w.room_tokens) if num_tokens > w.room_tokens else 0.0)
        for w in workers
    ]


def _local_costs(prompt: Prompt, workers: Sequence[Estimate]) -> list[float]:
    num_tokens, cached = prompt.num_tokens, prompt.cached.get
    return [
        w.local_s
        + (num_tokens - cached(w.address, 0)) * w.local_rate_s
        + (w.missing_s * (num_tokens - w.room_tokens) if num_tokens > w.room_tokens else 0.0)
        for w in workers
    ]


# The estimates of one candidate; formulas in docs/routing.md.


def _wait_s(prompt: Prompt, decode: Estimate) -> float:
    return decode.seat_s + max(0, prompt.num_tokens - decode.room_tokens) * decode.missing_s


def _local(prompt: Prompt, worker: Estimate) -> Candidate:
    cached = prompt.cached.get(worker.address, 0)
    uncached = prompt.num_tokens - cached
    compute_s, harm_s = uncached * worker.local_token_s, uncached * worker.harm_s
    wait_s = _wait_s(prompt, worker)
    return Candidate(
        worker.address,
        None,
        cached,
        worker.local_queue_s,
        compute_s,
        0.0,
        wait_s,
        worker.mixed_itl_s,
        worker.stream_s,
        harm_s,
        worker.local_queue_s + compute_s + wait_s + worker.stream_s + harm_s,
    )


def _pair(prompt: Prompt, prefill: Estimate, decode: Estimate) -> Candidate:
    cached = prompt.cached.get(prefill.address, 0)
    compute_s = (prompt.num_tokens - cached) * prefill.token_s
    missing = prompt.num_tokens - prompt.cached.get(decode.address, 0)
    # The last chunk's blocks can only travel when it is computed.
    late = min(missing, prefill.report.chunk_tokens)
    handoff_s = HANDOFF_S + max(missing * prefill.kv_token_s - compute_s, late * prefill.kv_token_s)
    wait_s = _wait_s(prompt, decode)
    return Candidate(
        decode.address,
        prefill.address,
        cached,
        prefill.queue_s,
        compute_s,
        handoff_s,
        wait_s,
        decode.itl_s,
        decode.stream_s,
        0.0,
        prefill.queue_s + compute_s + handoff_s + wait_s + decode.stream_s,
    )
