"""Every state that the handoff's shipped state machines can reach in a small world, breadth first.

The machines are those that ship; what surrounds them is as small as it can be: one or two pages on each
side, one or two requests, control streams that may lose a message, a transport that writes late, processes
that die and come back. No router helps: its cancels reach one side only, or nobody. A state is stored by
what it means: times as ages, tombstones without their time, content only where it can still matter. Two
questions are asked of all of them: does anything happen that must never happen (that raises
``ViolationError``, with the shortest way there), and can every block become free again by steps that are no
faults and no new work (states from which they cannot are *stuck*).

A machine is a pure function of its state and what it is told, so each answer is computed once, by the real
code, and remembered: see ``Side``. The exploration itself then walks over small numbers.

KV may lie in several groups, a window and a state among them: a block is one token then, a page of the window
is given back when the next token no longer sees it, and every computed block changes the state in place.

What it leaves out, the simulated world of ``handoff_world`` has: prefix caches that change, preemption,
messages that come late a second time, more than two of most things.
"""

from __future__ import annotations

import pickle
import time
from array import array
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from baton.engine.kv.arriving import Arriving, ArrivingGroup, needed_blocks
from baton.handoff import decode as decode_module
from baton.handoff import prefill as prefill_module
from baton.handoff.blocks import Binding, GroupBlocks
from baton.handoff.decode import DecodeHandoff as DecodeHandoff
from baton.handoff.decode import DecodeHandoffs
from baton.handoff.decode import DecodeHandoffState as DecodeState
from baton.handoff.messages import (
    Action,
    CancelReceive,
    Commit,
    Compute,
    Fail,
    Fence,
    First,
    LinkId,
    Name,
    PostReceive,
    Retire,
    Send,
    SendBlocks,
    Stop,
    ToDecode,
    ToPrefill,
)
from baton.handoff.prefill import Computed, PrefillHandoffs
from baton.roles.group_blocks import arriving_binding, finished_blocks, wanted_blocks
from baton.transport.block_names import place_of
from baton_kernels.kv_layout import KVGroup, StateKV, TokenKV
from tests.support.handoff_world import ViolationError, require

TICK_S = 1.0
"""Long enough for every repetition to be due; two of them make a fence."""
OLDEST_S = 3.0
"""Beyond this, ages make no difference."""
FULL = KVGroup(TokenKV(1, 2, 1), (0,), range(1), 1)
WINDOW = KVGroup(TokenKV(1, 2, 1, window=2), (1,), range(1, 2), 1)
STATE = KVGroup(StateKV(1, 1), (2,), range(2, 3), 1)
POSTED, SENDING, READ, LANDED = range(4)
CLOSED, FENCING, UP = range(3)


@dataclass(frozen=True, slots=True)
class Instance:
    """A world to explore. The numbers of faults are what all its histories together may spend."""

    requests: tuple[int, ...] = (1, 1)
    """Blocks of each."""
    attempts: int = 1
    prefills: int = 1
    """Request i goes to prefill i modulo this."""
    groups: tuple[KVGroup, ...] = (FULL,)
    hit: bool = False
    """Decode's prefix cache has block 0 of the first group of every request, in a page of its own."""
    early_state: bool = False
    """A planted fault: prefill takes a state for finished that it still changes."""
    prefill_pages: int = 1
    decode_pages: int = 1
    max_queued: int = 4
    segment_blocks: int = 1
    """Blocks that travel as one message at most."""
    one_sided: bool = True
    """Prefill writes into decode's pages: a send is over when it has landed, and neither decode's cancel nor
    prefill's death keeps it from landing. Otherwise decode copies, and may refuse."""
    cancels: int = 1
    crashes: int = 1
    losses: int = 1
    repeats: int = 0
    cuts: int = 0
    """Connections that break though nobody died."""
    fences_may_hang: bool = False
    decode_machine: type[DecodeHandoffs] = DecodeHandoffs
    prefill_machine: type[PrefillHandoffs] = PrefillHandoffs


class Budget(NamedTuple):
    cancels: int
    crashes: int
    losses: int
    repeats: int
    cuts: int


# --- the two sides: a real machine and as much memory as it needs


class Pages:
    """A handful of pages: references, and for whom each is pinned."""

    def __init__(self, n: int) -> None:
        self.refs = [0] * n
        self.pins = [0] * n

    def free(self) -> list[int]:
        return [p for p, refs in enumerate(self.refs) if not refs and not self.pins[p]]

    def allocate(self, n: int) -> tuple[int, ...] | None:
        pages = tuple(self.free()[:n])
        if len(pages) < n:
            return None
        for page in pages:
            self.refs[page] = 1
        return pages

    def release(self, pages: tuple[int, ...]) -> None:
        for page in pages:
            require(self.refs[page] > 0, f"page {page} was freed twice")
            self.refs[page] -= 1

    def pin(self, pages: tuple[int, ...]) -> None:
        for page in pages:
            self.pins[page] += 1

    def unpin(self, pages: tuple[int, ...]) -> None:
        for page in pages:
            require(self.pins[page] > 0, f"page {page} was unpinned twice")
            self.pins[page] -= 1


Content = tuple[Name, int, int]
"""What a page holds: of which attempt, which block (of a state: after how
many) and which group."""


class Room:
    """``baton.handoff.decode.DecodeMemory`` without a prefix cache that changes."""

    def __init__(self, instance: Instance) -> None:
        self.groups = instance.groups
        self.cached = instance.decode_pages if instance.hit else None
        """The page that the cache has, behind all others; it is never given away."""
        self.blocks = {f"r{i}": n for i, n in enumerate(instance.requests)}
        self.pages = Pages(instance.decode_pages)
        self.reserved: dict[Name, int] = {}
        self.owners: dict[int, Name] = {}

    def _need(self, num_tokens: int) -> int:
        pages = sum(len(needed_blocks(g, num_tokens, 1)) * len(g.tables) for g in self.groups)
        return pages - (self.cached is not None)

    def fits(self, num_tokens: int) -> bool:
        return self._need(num_tokens) <= len(self.pages.refs)

    def reserve(self, name: Name, num_tokens: int) -> bool:
        need = self._need(num_tokens)
        if need > len(self.pages.free()) - sum(self.reserved.values()):
            return False
        require(name not in self.reserved, f"room was promised to {name} twice")
        self.reserved[name] = need
        return True

    def unreserve(self, name: Name) -> None:
        require(name in self.reserved, f"a promise to {name} was taken back that was not made")
        del self.reserved[name]

    def bind(self, name: Name, blocks_per_page: int) -> Binding | None:
        pages = self.pages.allocate(self.reserved[name])
        if pages is None:
            return None
        num_tokens, supply = self.blocks[name.request_id], iter(pages)
        bound: list[ArrivingGroup] = []
        for number, group in enumerate(self.groups):
            needed = needed_blocks(group, num_tokens, 1)
            hit = [self.cached] if self.cached is not None and not number else []
            fresh = [next(supply) for _ in range(len(needed) * len(group.tables) - len(hit))]
            missing = range(needed.start + len(hit), needed.stop)
            bound.append(ArrivingGroup(group, needed.start, (*hit, *fresh), (missing,) if missing else ()))
        binding = arriving_binding(Arriving(tuple(bound)), num_tokens, 1, blocks_per_page)
        self.pages.pin(binding.pinned)
        self.unreserve(name)
        self.owners.update(dict.fromkeys(binding.pinned, name))
        return binding

    def unpin(self, pages: tuple[int, ...]) -> None:
        self.pages.unpin(pages)
        for page in pages:
            del self.owners[page]

    def free(self, name: Name, pages: tuple[int, ...]) -> None:
        self.pages.release(tuple(page for page in pages if page != self.cached))

    def manifest(self, name: Name) -> tuple[int, bytes, int]:
        return self.blocks[name.request_id], name.request_id.encode(), 1


class DecodeProcess:
    """One process start of decode. ``apply`` carries out what stays inside, and returns the rest."""

    def __init__(self, instance: Instance, incarnation: str) -> None:
        self.room = Room(instance)
        self.machine = instance.decode_machine(
            incarnation, self.room, drained_is_proof=instance.one_sided, max_queued=instance.max_queued
        )
        self.running: dict[Name, tuple[int, ...]] = {}
        self.ended: set[Name] = set()
        self.retiring = False

    def apply(self, what: str, *arguments: Any) -> list[Action | LinkId | None]:
        if what == "open_link":
            return [self.machine.open_link(*arguments)]
        if what == "finish":
            self.room.free(arguments[0], self.running.pop(arguments[0]))
            return self._inside(self.machine.pump(0.0))
        if what == "cancel":
            self.ended.add(arguments[0])
            actions = self._inside(self.machine.cancel(arguments[0], 0.0))
            pages = self.running.pop(arguments[0], None)
            if pages is not None:
                self.room.free(arguments[0], pages)
                actions += self._inside(self.machine.pump(0.0))
            return actions
        now = TICK_S if what == "tick" else 0.0
        return self._inside(getattr(self.machine, what)(*arguments, now))

    def _inside(self, actions: list[Action]) -> list[Action | LinkId | None]:
        outside: list[Action | LinkId | None] = []
        for action in actions:
            match action:
                case Commit(name=name, binding=Binding(pages=pages)):
                    require(name not in self.ended, f"{name} was committed after it had been given up")
                    self.running[name] = pages
                    outside.append(action)
                case Fail(name=name):
                    self.ended.add(name)
                case Retire():
                    self.retiring = True
                case Stop():
                    pass
                case _:
                    outside.append(action)
        return outside

    def rebase(self, now: float) -> None:
        """Make the present 0, so that only ages are left."""
        rebase(self.machine, now)

    def key(self) -> Hashable:
        room = self.room
        return (
            machine_key(self.machine),
            (tuple(room.pages.refs), tuple(room.pages.pins), freeze(room.reserved), freeze(room.owners)),
            (freeze(self.running), frozenset(self.ended), self.retiring),
        )

    def facts(self, instance: Instance) -> DecodeFacts:
        pages = self.room.pages
        return DecodeFacts(
            incarnation=self.machine.incarnation,
            owners=tuple(self.room.owners.get(page) for page in range(len(pages.refs))),
            running=tuple(self.running),
            retiring=self.retiring and instance.fences_may_hang,
            quiet=not (any(pages.refs + pages.pins) or self.room.reserved or self.machine.open_handoffs),
        )


class DecodeFacts(NamedTuple):
    """What others can see of a decode process."""

    incarnation: str
    owners: tuple[Name | None, ...]
    running: tuple[Name, ...]
    retiring: bool
    quiet: bool


@dataclass(slots=True)
class Job:
    """A request in prefill's engine."""

    blocks: int
    asked: bool = False
    running: bool = False
    tables: list[list[int | None]] = field(default_factory=list)
    """The table of each token group; None where a page was given back."""
    state: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def pages(self) -> tuple[int, ...]:
        return (*(page for table in self.tables for page in table if page is not None), *self.state)


@dataclass(frozen=True, slots=True)
class Wrote:
    """Prefill's engine has written a page. Reported, as nothing may send it meanwhile."""

    page: int


class PrefillProcess:
    """One process start of prefill: machine, engine and pages."""

    def __init__(self, instance: Instance, incarnation: str) -> None:
        self.incarnation = incarnation
        self.groups, self.early_state = instance.groups, instance.early_state
        self.pages = Pages(instance.prefill_pages)
        self.content: list[Content | None] = [None] * instance.prefill_pages
        self.jobs: dict[Name, Job] = {}
        self.machine = instance.prefill_machine(self)

    # what the machine asks of its memory

    def finished(self, name: Name, blocks_per_page: int) -> tuple[GroupBlocks, ...]:
        job = self.jobs.get(name)
        if job is None or not job.tables:
            return ()
        whole = job.computed == job.blocks or (self.early_state and job.computed > 0)
        gone = [sum(page is None for page in table) for table in job.tables]
        tables = [[page or 0 for page in table] for table in job.tables]
        return finished_blocks(
            self.groups, tables, job.state, gone, job.computed, blocks_per_page, whole=whole
        )

    def pin(self, pages: tuple[int, ...]) -> None:
        self.pages.pin(pages)

    def unpin(self, pages: tuple[int, ...]) -> None:
        self.pages.unpin(pages)

    # what happens to it

    def apply(self, what: str, *arguments: Any) -> list[Action | Wrote]:
        if what == "submit":
            self.jobs[arguments[0]] = Job(arguments[1])
            return []
        if what == "link_opened":
            self.machine.link_opened(*arguments)
            return []
        if what == "compute":
            return self._compute(*arguments)
        if what == "ask":
            name, link = arguments
            self.jobs[name].asked = True
            blocks = self.jobs[name].blocks
            wanted = wanted_blocks(self.groups, blocks, 1)
            return self._inside(self.machine.ask(name, link, blocks, wanted, 0.0))
        now = TICK_S if what == "tick" else 0.0
        actions = self._inside(getattr(self.machine, what)(*arguments, now))
        if what == "cancel":
            self._drop(arguments[0])
        return actions

    def _compute(self, name: Name) -> list[Action | Wrote]:
        job = self.jobs[name]
        if not job.tables:
            self._bind(job)
        wrote = self._write(name, job)
        if job.computed < job.blocks:
            return [*wrote, *self._inside(self.machine.progress(name))]
        done = Computed(job.blocks, name.request_id.encode(), (First(7),), cached_tokens=0)
        return [*wrote, *self._inside(self.machine.computed(name, done))]

    def _bind(self, job: Job) -> None:
        pages = self.pages.allocate(pages_of_job(self.groups, job.blocks))
        assert pages is not None
        supply = iter(pages)
        for group in self.groups:
            if isinstance(group.kv, StateKV):
                job.state = [next(supply) for _ in group.tables]
            else:
                job.tables.append([next(supply) for _ in range(job.blocks)])

    def _write(self, name: Name, job: Job) -> list[Action | Wrote]:
        """Compute a block of every group, and give back what the next token does not see."""
        wrote: list[Action | Wrote] = []
        tables = iter(job.tables)
        for number, group in enumerate(self.groups):
            if isinstance(group.kv, StateKV):
                written, block = job.state, job.computed + 1
            else:
                table, block = next(tables), job.computed
                page = table[block]
                assert page is not None
                written = [page]
                for gone in range(needed_blocks(group, block + 1, 1).start):
                    freed, table[gone] = table[gone], None
                    self.pages.release(() if freed is None else (freed,))
            for page in written:
                self.content[page] = (name, block, number)
                wrote.append(Wrote(page))
        job.computed += 1
        return wrote

    def _inside(self, actions: list[Action]) -> list[Action | Wrote]:
        outside: list[Action | Wrote] = []
        for action in actions:
            match action:
                case Compute(name=name):
                    self.jobs[name].running = True
                case Stop(name=name) | Fail(name=name):
                    self._drop(name)
                case _:
                    outside.append(action)
        return outside

    def _drop(self, name: Name) -> None:
        job = self.jobs.pop(name, None)
        if job is not None:
            self.pages.release(job.pages)

    def rebase(self, now: float) -> None:
        rebase(self.machine, now)
        for page in self.pages.free():
            self.content[page] = None

    def key(self) -> Hashable:
        return (
            self.incarnation,
            machine_key(self.machine),
            (tuple(self.pages.refs), tuple(self.pages.pins), tuple(self.content), freeze(self.jobs)),
        )

    def facts(self, instance: Instance) -> PrefillFacts:
        free = len(self.pages.free())
        quiet = not (any(self.pages.refs + self.pages.pins) or self.jobs or self.machine.open_handoffs)
        return PrefillFacts(
            incarnation=self.incarnation,
            to_ask=tuple(name for name, job in self.jobs.items() if not job.asked),
            to_compute=tuple(
                name
                for name, job in self.jobs.items()
                if job.running
                and job.computed < job.blocks
                and (job.tables or pages_of_job(self.groups, job.blocks) <= free)
            ),
            content=tuple(self.content),
            known=frozenset(self.jobs) | frozenset(self.machine._handoffs),
            quiet=quiet,
        )


def pages_of_job(groups: tuple[KVGroup, ...], blocks: int) -> int:
    """The pages that a prompt of so many blocks has in all groups, before any is given back."""
    return sum(len(g.tables) * (1 if isinstance(g.kv, StateKV) else blocks) for g in groups)


class PrefillFacts(NamedTuple):
    """What others can see of a prefill process."""

    incarnation: str
    to_ask: tuple[Name, ...]
    to_compute: tuple[Name, ...]
    content: tuple[Content | None, ...]
    known: frozenset[Name]
    quiet: bool


# --- states by their meaning


NOT_STATE = {"counters", "_room", "_source", "_drained_is_proof", "_max_queued", "incarnation"}
IN_ORDER = {"_handoffs", "_queue"}
"""Attributes of the machines in which order decides who is served first."""


def rebase(machine: DecodeHandoffs | PrefillHandoffs, now: float) -> None:
    """Turn the times a machine has noted into ages below zero."""
    for handoff in machine._handoffs.values():
        handoff.spoke_at = 0.0  # whoever waits repeats himself at every tick, so it is no older
        if isinstance(handoff, DecodeHandoff):
            draining = handoff.state is DecodeState.DRAINING
            handoff.draining_since = max(handoff.draining_since - now, -OLDEST_S) if draining else 0.0
    if isinstance(machine, DecodeHandoffs):
        for link in machine._links.values():
            if link.fencing_since is not None:
                link.fencing_since = max(link.fencing_since - now, -OLDEST_S)
    ended = machine._tombstones._ended
    for request_id, (attempt, _) in ended.items():
        ended[request_id] = (attempt, 0.0)


def freeze(value: Any) -> Hashable:
    """Something hashable that is equal for equal values."""
    kind = type(value)
    if kind is dict:
        return tuple((k, freeze(v)) for k, v in value.items())
    if kind is list or kind is deque:
        return tuple(freeze(v) for v in value)
    if kind is set:
        return frozenset(value)
    if getattr(kind, "__hash__", None) is None:  # a dataclass that changes
        return tuple(freeze(getattr(value, name)) for name in kind.__slots__)
    return value  # type: ignore[no-any-return]


def machine_key(machine: DecodeHandoffs | PrefillHandoffs) -> Hashable:
    parts: list[Hashable] = [getattr(machine, "incarnation", None)]
    for name, value in vars(machine).items():
        if name in NOT_STATE:
            continue
        if name == "_tombstones":
            parts.append(frozenset(value._ended.items()))
        elif name in IN_ORDER or type(value) is not dict:
            parts.append(freeze(value))
        else:
            parts.append(frozenset((k, freeze(v)) for k, v in value.items()))
    return tuple(parts)


class Side:
    """All states of one side that were ever met, by number, and what each does when it is told something."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._numbers: dict[Hashable, int] = {}
        self._stored: list[bytes] = []
        self._moves: dict[tuple[int, tuple[Any, ...]], tuple[int, tuple[Any, ...]]] = {}
        self.facts: list[Any] = []

    def start(self, process: DecodeProcess | PrefillProcess) -> int:
        return self._intern(process, 0.0)

    def tell(self, number: int, *event: Any) -> tuple[int, tuple[Any, ...]]:
        """The state after an event, and the actions that leave the process."""
        known = self._moves.get((number, event))
        if known is None:
            process = pickle.loads(self._stored[number])
            actions = tuple(process.apply(*event))
            after = self._intern(process, TICK_S if event[0] == "tick" else 0.0)
            known = self._moves[number, event] = after, actions
        return known

    def _intern(self, process: DecodeProcess | PrefillProcess, now: float) -> int:
        process.rebase(now)
        key = process.key()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._stored)
            self._stored.append(pickle.dumps(process, pickle.HIGHEST_PROTOCOL))
            self.facts.append(process.facts(self._instance))
        return number


# --- the whole


class Wire(NamedTuple):
    """A link: who still holds it, and the messages under way, each way in order."""

    link: LinkId
    at_prefill: bool
    at_decode: int
    broken: bool
    to_decode: tuple[ToDecode, ...]
    to_prefill: tuple[ToPrefill, ...]


class Flight(NamedTuple):
    """One message on the data connection, from the posted receive until nobody can hear of it any more."""

    link: LinkId
    tag: int
    name: Name
    target: tuple[int, ...]
    source: tuple[int, ...] | None = None
    phase: int = POSTED
    send_over: bool = False
    receive_over: bool = False
    cancel_asked: bool = False
    cargo: tuple[Content | None, ...] | None = None
    """What was read, where that is before it lands."""


class State(NamedTuple):
    decode: int
    prefills: tuple[int, ...]
    wires: tuple[Wire, ...]
    flights: tuple[Flight, ...]
    content: tuple[Content | None, ...]
    """Of decode's pages that are pinned."""
    submitted: tuple[int, ...]
    committed: frozenset[tuple[str, Name]]
    """What was committed, and by which process start: a new one knows nothing of the old one's attempts."""
    budget: Budget


Successor = tuple[str, bool, State]
"""What happened, whether it is progress (no fault, no new work), and where it led."""


class Draft:
    """A state being changed."""

    def __init__(self, explorer: Explorer, state: State) -> None:
        self.explorer = explorer
        self.decode, prefills, wires, flights, content, self.submitted, self.committed, self.budget = state
        self.prefills = list(prefills)
        self.wires = {wire.link: wire for wire in wires}
        self.flights = {(flight.link, flight.tag): flight for flight in flights}
        self.content = list(content)

    # what the processes are told

    def tell_decode(self, *event: Any) -> Any:
        self.decode, actions = self.explorer.decode.tell(self.decode, *event)
        for action in actions:
            self._carry_out(action)
        return actions

    def tell_prefill(self, i: int, *event: Any) -> None:
        self.prefills[i], actions = self.explorer.prefill.tell(self.prefills[i], *event)
        for action in actions:
            if isinstance(action, Wrote):
                self._check_unsent(i, action.page)
            else:
                self._carry_out(action)

    def _carry_out(self, action: Action | LinkId | None) -> None:
        match action:
            case Send(link=link, message=message):
                self._post(link, message, from_decode=link.decode == self.facts.incarnation)
            case PostReceive():
                self._post_receive(action)
            case CancelReceive(link=link, tag=tag):
                self._change_flight((link, tag), cancel_asked=True)
            case SendBlocks(link=link, tag=tag, blocks=pages):
                self._start_send((link, tag), pages)
            case Commit():
                self._commit(action)
            case Fence(link=link):
                require(self.wires[link].at_decode == UP, f"{link} is fenced twice")
                self.wires[link] = self.wires[link]._replace(at_decode=FENCING, broken=True)
            case _:
                pass

    @property
    def facts(self) -> DecodeFacts:
        return self.explorer.decode.facts[self.decode]  # type: ignore[no-any-return]

    def _change_flight(self, key: tuple[LinkId, int], **changes: Any) -> None:
        if key in self.flights:
            self.flights[key] = self.flights[key]._replace(**changes)

    def _post(self, link: LinkId, message: Any, from_decode: bool) -> None:
        """Append to the stream, unless the very message is under way already: twice is the same as once."""
        wire = self.wires.get(link)
        if wire is None:
            return
        to_prefill = type(message).__name__ in TO_PREFILL
        if to_prefill and wire.at_prefill and message not in wire.to_prefill:
            self.wires[link] = wire._replace(to_prefill=(*wire.to_prefill, message))
        elif not to_prefill and wire.at_decode and message not in wire.to_decode:
            self.wires[link] = wire._replace(to_decode=(*wire.to_decode, message))

    # the oracles

    def _check_unsent(self, i: int, page: int) -> None:
        incarnation = self.explorer.prefill.facts[self.prefills[i]].incarnation
        for flight in self.flights.values():
            sends = flight.source is not None and page in flight.source and not flight.send_over
            require(
                not sends or flight.link.prefill != incarnation,
                f"source page {page} is changed while {flight.name} sends it",
            )

    def _post_receive(self, action: PostReceive) -> None:
        require(self.wires[action.link].at_decode == UP, f"{action} is posted on a link that is being fenced")
        target = tuple(map(place_of, action.blocks))
        name = self.facts.owners[target[0]]
        for other in self.flights.values():
            may_write = self.may_land(other) if self.explorer.instance.one_sided else not other.receive_over
            require(
                not (may_write and set(other.target) & set(target)),
                f"pages {target} are granted while {other.name} may still write to them",
            )
        require(name is not None, f"{action} goes to pages pinned for nobody")
        assert name is not None
        self.flights[action.link, action.tag] = Flight(action.link, action.tag, name, target)

    def _start_send(self, key: tuple[LinkId, int], pages: tuple[int, ...]) -> None:
        flight = self.flights.get(key)
        require(flight is not None, f"a send {key} has no receive")
        assert flight is not None
        require(flight.source is None, f"{key} is sent twice")
        self.flights[key] = flight._replace(source=tuple(map(place_of, pages)), phase=SENDING)

    def may_land(self, flight: Flight) -> bool:
        """Whether the transport may yet write into decode's pages."""
        wire = self.wires.get(flight.link)
        if wire is None or not wire.at_decode or flight.link.decode != self.facts.incarnation:
            return False
        if self.explorer.instance.one_sided:
            return flight.phase in (SENDING, READ)
        return flight.phase == READ and not flight.receive_over

    def land(self, flight: Flight) -> None:
        for page in flight.target:
            owner = self.facts.owners[page]
            require(owner == flight.name, f"{flight.name} writes into page {page}, pinned for {owner}")
        cargo = flight.cargo or self.read(flight)
        for page, content in zip(flight.target, cargo, strict=True):
            self.content[page] = content
        self.flights[flight.link, flight.tag] = flight._replace(phase=LANDED, cargo=None)

    def read(self, flight: Flight) -> tuple[Content | None, ...]:
        for number in self.prefills:
            facts = self.explorer.prefill.facts[number]
            if facts.incarnation == flight.link.prefill:
                return tuple(facts.content[page] for page in flight.source or ())
        raise AssertionError("a dead prefill's pages were read")

    def _commit(self, commit: Commit) -> None:
        name = commit.name
        require(all(n != name for _, n in self.committed), f"{name} was committed twice")
        here = self.facts.incarnation
        newer = [n for at, n in self.committed if at == here and n.request_id == name.request_id and n > name]
        require(not newer, f"{name} was committed after {newer}")
        cached, blocks = self.explorer.cached, self.explorer.blocks[name.request_id]
        for number, bound in enumerate(commit.binding.groups):
            is_state = isinstance(self.explorer.instance.groups[number].kv, StateKV)
            for block in range(bound.first, bound.end):
                for page in map(place_of, bound.names_of(block, block + 1)):
                    held = (name, 0, 0) if page == cached else self.content[page]
                    right = held == (name, blocks if is_state else block, number)
                    require(right, f"{name} was committed with {held} as its block {block} of group {number}")
        for flight in self.flights.values():
            writes = self.may_land(flight) and set(flight.target) & set(commit.binding.pages)
            require(not writes, f"{name} was committed while {flight.name} may write to its pages")
        self.committed |= {(here, name)}

    # sealing

    def seal(self) -> State:
        facts = self.facts
        flights: tuple[Flight, ...] = ()
        if self.flights:
            alive = [self.explorer.prefill.facts[number] for number in self.prefills]
            known = {prefill.incarnation: prefill.known for prefill in alive}
            left = [f for f in self.flights.values() if self._matters(f, known, facts.incarnation)]
            flights = tuple(sorted(left, key=lambda f: (f.link, f.tag)))
        for page, owner in enumerate(facts.owners):
            if owner is None:
                self.content[page] = None
        return State(
            self.decode,
            tuple(self.prefills),
            tuple([w for w in self.wires.values() if w.at_prefill or w.at_decode]),
            flights,
            tuple(self.content),
            self.submitted,
            self.committed,
            self.budget,
        )

    def _matters(self, flight: Flight, known: dict[str, frozenset[Name]], decode: str) -> bool:
        """Whether something can still come of it, on either side."""
        if flight.link.prefill in known:
            if flight.source is not None and not flight.send_over:
                return True
            if flight.source is None and flight.name in known[flight.link.prefill]:
                return True
        wire = self.wires.get(flight.link)
        if wire is None or not wire.at_decode or flight.link.decode != decode:
            return False
        return not flight.receive_over or self.may_land(flight)


TO_PREFILL = {"Credit", "Decline", "Grant", "Release", "Cancel"}


@dataclass(slots=True)
class Result:
    states: int
    transitions: int
    seconds: float
    stuck: int
    """States from which not every block can become free."""
    way: list[str] = field(default_factory=list)
    """The shortest way to one of them."""

    def __str__(self) -> str:
        return f"{self.states:,} states, {self.transitions:,} steps, {self.seconds:.0f} s, {self.stuck} stuck"


class Explorer:
    """Walks over all states of an instance."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.blocks = {f"r{i}": n for i, n in enumerate(instance.requests)}
        self.cached = instance.decode_pages if instance.hit else None
        self._alike = len(set(instance.requests)) == 1
        """Requests can be exchanged for each other: it is enough if the first one comes first."""
        self.decode = Side(instance)
        self.prefill = Side(instance)

    def start(self) -> State:
        instance = self.instance
        return State(
            self.decode.start(DecodeProcess(instance, "D1")),
            tuple(self.prefill.start(PrefillProcess(instance, f"P{i}.1")) for i in range(instance.prefills)),
            (),
            (),
            (None,) * instance.decode_pages,
            (0,) * len(instance.requests),
            frozenset(),
            Budget(instance.cancels, instance.crashes, instance.losses, instance.repeats, instance.cuts),
        )

    # --- what can happen

    def successors(self, state: State) -> Iterator[tuple[str, bool, Draft]]:
        for events in (
            self._router,
            self._engines,
            self._messages,
            self._transfers,
            self._links,
            self._time,
            self._deaths,
        ):
            yield from events(state)

    def _router(self, state: State) -> Iterator[tuple[str, bool, Draft]]:
        """New attempts, also while an older one lives, and cancels that reach only one side."""
        for r, tries in enumerate(state.submitted):
            i, blocks = r % self.instance.prefills, self.instance.requests[r]
            committed = any(name.request_id == f"r{r}" for _, name in state.committed)
            mirrored = self._alike and not tries and r > 0 and not state.submitted[r - 1]
            if tries < self.instance.attempts and not committed and not mirrored:
                draft, name = Draft(self, state), Name(f"r{r}", tries)
                draft.submitted = (*state.submitted[:r], tries + 1, *state.submitted[r + 1 :])
                draft.tell_prefill(i, "submit", name, blocks)
                yield f"submit {name.request_id}.{tries}", False, draft
            if not state.budget.cancels:
                continue
            for attempt in range(tries):
                name = Name(f"r{r}", attempt)
                for side in ("prefill", "decode"):
                    draft = Draft(self, state)
                    draft.budget = state.budget._replace(cancels=state.budget.cancels - 1)
                    if side == "prefill":
                        draft.tell_prefill(i, "cancel", name)
                    else:
                        draft.tell_decode("cancel", name)
                    yield f"cancel {name.request_id}.{attempt} at {side}", False, draft

    def _engines(self, state: State) -> Iterator[tuple[str, bool, Draft]]:
        for i, number in enumerate(state.prefills):
            facts = self.prefill.facts[number]
            for name in facts.to_ask:
                link = self._link_of(state, facts.incarnation)
                if link is not None:
                    draft = Draft(self, state)
                    draft.tell_prefill(i, "ask", name, link)
                    yield f"ask {name.request_id}.{name.attempt}", True, draft
            for name in facts.to_compute:
                draft = Draft(self, state)
                draft.tell_prefill(i, "compute", name)
                yield f"compute {name.request_id}.{name.attempt}", True, draft
        for name in self.decode.facts[state.decode].running:
            draft = Draft(self, state)
            draft.tell_decode("finish", name)
            yield f"finish {name.request_id}.{name.attempt}", True, draft

    def _link_of(self, state: State, prefill: str) -> LinkId | None:
        decode = self.decode.facts[state.decode].incarnation
        for wire in state.wires:
            if wire.at_prefill and wire.link.prefill == prefill and wire.link.decode == decode:
                return wire.link
        return None

    def _prefill_at(self, state: State, incarnation: str) -> int | None:
        for i, number in enumerate(state.prefills):
            if self.prefill.facts[number].incarnation == incarnation:
                return i
        return None

    def _messages(self, state: State) -> Iterator[tuple[str, bool, Draft]]:
        """The first message each way arrives, or is lost, or arrives and stays to arrive again."""
        budget = state.budget
        for wire in state.wires:
            for way, queue in (("to_decode", wire.to_decode), ("to_prefill", wire.to_prefill)):
                if not queue:
                    continue
                what = type(queue[0]).__name__
                rest = wire._replace(**{way: queue[1:]})  # type: ignore[arg-type]
                draft = Draft(self, state)
                draft.wires[wire.link] = rest
                self._arrive(draft, wire.link, way, queue[0])
                yield what, True, draft
                if budget.losses:
                    draft = Draft(self, state)
                    draft.wires[wire.link] = rest
                    draft.budget = budget._replace(losses=budget.losses - 1)
                    yield f"lose {what}", False, draft
                if budget.repeats:
                    draft = Draft(self, state)
                    draft.budget = budget._replace(repeats=budget.repeats - 1)
                    self._arrive(draft, wire.link, way, queue[0])
                    yield f"repeat {what}", False, draft

    def _arrive(self, draft: Draft, link: LinkId, way: str, message: Any) -> None:
        if way == "to_decode":
            draft.tell_decode("receive", link, message)
            return
        for i, number in enumerate(draft.prefills):
            if self.prefill.facts[number].incarnation == link.prefill:
                draft.tell_prefill(i, "receive", link, message)

    def _transfers(self, state: State) -> Iterator[tuple[str, bool, Draft]]:
        broken = {wire.link for wire in state.wires if wire.broken}
        standing = {wire.link for wire in state.wires if wire.at_decode}
        at_prefill = {self.prefill.facts[number].incarnation: i for i, number in enumerate(state.prefills)}
        look = Draft(self, state)
        for flight in state.flights:
            yield from self._moves_of(state, look, flight)
            i = at_prefill.get(flight.link.prefill)
            if i is not None and flight.source is not None and not flight.send_over:
                whole = flight.phase == LANDED or (flight.phase == READ and not self.instance.one_sided)
                cut = flight.link in broken or flight.link not in {wire.link for wire in state.wires}
                for ok in (True,) * whole + (False,) * cut:
                    draft = Draft(self, state)
                    draft.flights[flight.link, flight.tag] = flight._replace(send_over=True)
                    draft.tell_prefill(i, "sent", flight.link, flight.tag, ok)
                    yield f"send over, {ok}", True, draft
            if flight.link in standing and not flight.receive_over:
                yield from self._receive_ends(state, flight, flight.link in broken)

    def _moves_of(self, state: State, look: Draft, flight: Flight) -> Iterator[tuple[str, bool, Draft]]:
        """Bytes move: out of prefill's pages, where decode copies them, and into decode's."""
        if look.may_land(flight):
            draft = Draft(self, state)
            draft.land(flight)
            yield f"land {flight.name.request_id}.{flight.name.attempt}", True, draft
        if flight.phase == SENDING and not self.instance.one_sided and not flight.send_over:
            draft = Draft(self, state)
            gone = flight.receive_over
            changed = flight._replace(
                phase=LANDED if gone else READ, cargo=None if gone else draft.read(flight)
            )
            draft.flights[flight.link, flight.tag] = changed
            yield "read", True, draft

    def _receive_ends(self, state: State, flight: Flight, broken: bool) -> Iterator[tuple[str, bool, Draft]]:
        """Decode hears: all bytes are there; or a cancel found nothing; or the connection is dead."""
        mine = not self.instance.one_sided
        ends = [True] if flight.phase == LANDED else []
        if mine and flight.phase < LANDED and (broken or (flight.cancel_asked and flight.phase < READ)):
            ends.append(False)
        for ok in ends:
            draft = Draft(self, state)
            draft.flights[flight.link, flight.tag] = flight._replace(receive_over=True, cargo=None)
            draft.tell_decode("received", flight.link, flight.tag, ok)
            yield f"receive over, {ok}", True, draft

    def _links(self, state: State) -> Iterator[tuple[str, bool, Draft]]:
        for wire in state.wires:
            i = self._prefill_at(state, wire.link.prefill)
            if wire.broken and wire.at_prefill and i is not None:
                draft = Draft(self, state)
                draft.wires[wire.link] = wire._replace(at_prefill=False, to_prefill=())
                draft.tell_prefill(i, "link_lost", wire.link)
                yield "prefill notices", True, draft
            if wire.broken and wire.at_decode == UP:
                draft = Draft(self, state)
                draft.tell_decode("link_lost", wire.link)
                yield "decode notices", True, draft
            if wire.at_decode == FENCING:
                draft = Draft(self, state)
                draft.wires[wire.link] = wire._replace(at_decode=CLOSED, to_decode=())
                draft.tell_decode("link_fenced", wire.link)
                yield "fenced", True, draft
            if state.budget.cuts and not wire.broken:
                draft = Draft(self, state)
                draft.budget = state.budget._replace(cuts=state.budget.cuts - 1)
                draft.wires[wire.link] = wire._replace(broken=True)
                yield "cut", False, draft
        yield from self._connects(state)

    def _connects(self, state: State) -> Iterator[tuple[str, bool, Draft]]:
        """Prefill dials decode when it has something to ask for. Decode fences the old link first."""
        for i, number in enumerate(state.prefills):
            facts = self.prefill.facts[number]
            if not facts.to_ask or self._link_of(state, facts.incarnation) is not None:
                continue
            draft = Draft(self, state)
            for wire in state.wires:
                if wire.link.prefill == facts.incarnation and wire.at_decode == UP:
                    draft.tell_decode("link_lost", wire.link)
            (link,) = draft.tell_decode("open_link", facts.incarnation)
            if link is not None:
                draft.wires[link] = Wire(link, True, UP, False, (), ())
                draft.tell_prefill(i, "link_opened", link)
            yield "connect", True, draft

    def _time(self, state: State) -> Iterator[tuple[str, bool, Draft]]:
        if self.decode.tell(state.decode, "tick") != (state.decode, ()):
            draft = Draft(self, state)
            draft.tell_decode("tick")
            yield "time at decode", True, draft
        for i, number in enumerate(state.prefills):
            if self.prefill.tell(number, "tick") != (number, ()):
                draft = Draft(self, state)
                draft.tell_prefill(i, "tick")
                yield "time at prefill", True, draft

    def _deaths(self, state: State) -> Iterator[tuple[str, bool, Draft]]:
        facts = self.decode.facts[state.decode]
        if facts.retiring:
            yield "retire", True, self._decode_dies(state)
        if not state.budget.crashes:
            return
        budget = state.budget._replace(crashes=state.budget.crashes - 1)
        draft = self._decode_dies(state)
        draft.budget = budget
        yield "decode dies", False, draft
        for i in range(len(state.prefills)):
            draft = self._prefill_dies(state, i)
            draft.budget = budget
            yield "prefill dies", False, draft

    def _decode_dies(self, state: State) -> Draft:
        draft = Draft(self, state)
        starts = int(draft.facts.incarnation[1:]) + 1
        draft.decode = self.decode.start(DecodeProcess(self.instance, f"D{starts}"))
        for link, wire in draft.wires.items():
            draft.wires[link] = wire._replace(at_decode=CLOSED, broken=True, to_decode=())
        draft.content = [None] * len(draft.content)
        return draft

    def _prefill_dies(self, state: State, i: int) -> Draft:
        """What it had posted may still land: it is on its way, or the network card goes on reading."""
        draft = Draft(self, state)
        dead = self.prefill.facts[state.prefills[i]].incarnation
        place, starts = dead.split(".")
        for key, flight in draft.flights.items():
            if flight.link.prefill == dead and flight.phase == SENDING:
                draft.flights[key] = flight._replace(phase=READ, cargo=draft.read(flight), send_over=True)
        draft.prefills[i] = self.prefill.start(PrefillProcess(self.instance, f"{place}.{int(starts) + 1}"))
        for link, wire in draft.wires.items():
            if link.prefill == dead:
                draft.wires[link] = wire._replace(at_prefill=False, broken=True, to_prefill=())
        return draft

    # --- the walk

    def idle(self, state: State) -> bool:
        return self.decode.facts[state.decode].quiet and all(
            self.prefill.facts[number].quiet for number in state.prefills
        )

    def run(self, limit: int = 5_000_000) -> Result:
        """Visit every state. Raises ViolationError with the way to it; complains of too many states."""
        began = time.perf_counter()
        walk = Walk(self.start())
        with small_steps(self.instance):
            for number, state in walk.frontier():
                self._visit(walk, number, state, limit)
        stuck = walk.stuck()
        way = walk.way(min(stuck)) if stuck else []
        return Result(walk.size, len(walk.sources), time.perf_counter() - began, len(stuck), way)

    def _visit(self, walk: Walk, number: int, state: State, limit: int) -> None:
        walk.mark(number, self.idle(state))
        event = "?"
        successors = self.successors(state)
        try:
            while True:
                event, progress, draft = next(successors)
                walk.add(number, event, progress, draft.seal())
        except StopIteration:
            pass
        except ViolationError as error:
            raise ViolationError(f"{error}; after: {', '.join(walk.way(number))}, and then") from error
        if walk.size > limit:
            raise AssertionError(f"more than {limit} states")


class Walk:
    """The states met, numbered in the order of their distance, and how each was come to."""

    def __init__(self, start: State) -> None:
        self._parts: dict[Hashable, int] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._waiting: deque[tuple[int, State]] = deque()
        self._idle = bytearray()
        self._parents = array("i")
        self._events: list[str] = []
        self.sources = array("i")
        self._targets = array("i")
        self._discover(self._pack(start), start, -1, "start")

    @property
    def size(self) -> int:
        return len(self._numbers)

    def frontier(self) -> Iterator[tuple[int, State]]:
        while self._waiting:
            yield self._waiting.popleft()

    def mark(self, number: int, idle: bool) -> None:
        self._idle[number] = idle

    def add(self, source: int, event: str, progress: bool, state: State) -> None:
        packed = self._pack(state)
        number = self._numbers.get(packed)
        if number is None:
            number = self._discover(packed, state, source, event)
        if progress and number != source:
            self.sources.append(source)
            self._targets.append(number)

    def _discover(self, packed: tuple[int, ...], state: State, parent: int, event: str) -> int:
        number = self._numbers[packed] = len(self._numbers)
        self._parents.append(parent)
        self._events.append(event)
        self._idle.append(0)
        self._waiting.append((number, state))
        return number

    def _pack(self, state: State) -> tuple[int, ...]:
        """The same state in little memory: its parts are few, and numbered."""
        parts = self._parts
        return (
            state.decode,
            *state.prefills,
            *(
                parts.setdefault(part, len(parts))
                for part in (state.wires, state.flights, (state.content, *state[5:]))
            ),
        )

    def way(self, number: int) -> list[str]:
        events: list[str] = []
        while number > 0:
            events.append(self._events[number])
            number = self._parents[number]
        return events[::-1]

    def stuck(self) -> list[int]:
        """States from which progress leads to no idle one: what a walk backwards from those misses."""
        before: list[array[int]] = [array("i") for _ in range(self.size)]
        for source, target in zip(self.sources, self._targets, strict=True):
            before[target].append(source)
        good = bytearray(self._idle)
        todo = [number for number in range(self.size) if good[number]]
        while todo:
            for source in before[todo.pop()]:
                if not good[source]:
                    good[source] = 1
                    todo.append(source)
        return [number for number in range(self.size) if not good[number]]


@contextmanager
def small_steps(instance: Instance) -> Iterator[None]:
    """Short segments, and every repetition due at the next tick."""
    with (
        mock.patch.object(decode_module, "MAX_SEGMENT_BLOCKS", instance.segment_blocks),
        mock.patch.object(prefill_module, "REPEAT_ASK_S", TICK_S),
    ):
        yield


def explore(instance: Instance, **options: int) -> Result:
    return Explorer(instance).run(**options)
