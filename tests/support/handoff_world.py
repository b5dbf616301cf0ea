"""A simulated world around the handoff's state machines, to find schedules in which they go wrong.

The machines, the block pools, the router's ledger and the messages are those that ship. Simulated are what
they rely on: engines that compute, preempt and free; a router that cancels in any order and starts a
request again elsewhere; control streams that delay, repeat, lose and break; a transport that touches pages
late; processes that die. A page carries its content, so a byte in the wrong place is seen. KV may lie in
several groups: all blocks of the prompt, those of a window, which are given back when no later token sees
them, and a state, which every computed block changes in place. A token knows
which tokens it followed where it was sampled, so one in the wrong place of an answer is seen. Whatever must
not happen raises ``ViolationError`` at once, in ``World``'s own words.

A world does nothing by itself: whoever drives it calls one event after the other, with a number that decides
what is left open. Equal numbers make an equal history.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, TypeVar

from baton.engine.kv.arriving import Arriving, ArrivingGroup, needed_blocks, runs_of
from baton.engine.kv.block_pool import BlockPool
from baton.handoff.blocks import Binding, GroupBlocks
from baton.handoff.decode import DecodeHandoffs, DecodeHandoffState
from baton.handoff.messages import (
    Action,
    CancelReceive,
    Commit,
    Compute,
    Fail,
    Fence,
    First,
    Grant,
    LinkId,
    Name,
    PostReceive,
    Retire,
    Segment,
    Send,
    SendBlocks,
    Stop,
    ToDecode,
    ToPrefill,
)
from baton.handoff.prefill import Computed, PrefillHandoffs
from baton.roles.group_blocks import arriving_binding, finished_blocks, wanted_blocks, with_partial_blocks
from baton.router.dispatch.ledger import LedgerEntry
from baton.router.dispatch.types import TokenChunk
from baton.transport.block_names import page_of, place_of
from baton.v1 import inference_pb2, worker_pb2
from baton_kernels.kv_layout import KVGroup, StateKV, TokenKV

ATTEMPTS = 3
REPLAYED = 6
"""Delivered messages per stream that may come once more."""
ANSWER = 4
"""Tokens that a request is answered with."""
BLOCK_SIZE = 16
FULL = KVGroup(TokenKV(1, 2, 1), (0,), range(1), 1)
WINDOW = KVGroup(TokenKV(1, 2, 1, window=20), (1,), range(1, 2), 1)
STATE = KVGroup(StateKV(1, 1), (2,), range(2, 4), 1)
SMALL_TICK = 1
"""The number for ``tick`` that lets 0.25 s pass."""
SETTLE_TICKS = 160
"""Forty seconds: more than all escalation and repetition together."""
FORWARD = (
    "connect",
    "ask",
    "deliver",
    "compute",
    "publish",
    "read_page",
    "end_send",
    "match",
    "land_page",
    "end_receive",
    "cancel_receive_now",
    "deliver_cancel",
    "generate",
    "deliver_frame",
    "notice_at_prefill",
    "notice_at_decode",
    "end_fence",
)
"""Events that are no faults, and of which there is an end."""

T = TypeVar("T")


class ViolationError(AssertionError):
    """The protocol did what it must never do."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise ViolationError(text)


class Content(NamedTuple):
    """What a page holds: which block of which text and group, and which write put it there. Of a state:
    after how many blocks, and of which texts."""

    text: str
    block: int
    write: int
    group: int = 0


class Picker:
    """Takes the choices of one event out of one number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def below(self, n: int) -> int:
        self._number, choice = divmod(self._number, n)
        return choice

    def of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an attempt starts from, as blocks: the request's tokens, of which the first ``shared`` blocks are
    a prefix that others have too, and what was delivered of its answer before."""

    request: str
    prompt_blocks: int
    shared: int
    partial: bool
    """The last block of the request's own tokens is not full."""
    delivered: tuple[int, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return self.prompt_blocks * BLOCK_SIZE - 5 * self.partial

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + len(self.delivered)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // BLOCK_SIZE)

    def text(self, block: int) -> str:
        if self.delivered and (block + 1) * BLOCK_SIZE > self.prompt_tokens:
            return f"{self.request}{self.delivered}"
        return "common" if block < self.shared else self.request

    def content(self, number: int, group: KVGroup, block: int) -> tuple[str, int, int]:
        """What a block of a group must hold; of a state, after so many blocks."""
        if isinstance(group.kv, TokenKV):
            return self.text(block), block, number
        return digest_of((self.text(i), i) for i in range(block)).decode(), block, number

    def state_digest(self, num_blocks: int) -> bytes:
        return digest_of((self.text(i), i) for i in range(num_blocks))

    def digests(self, blocks_per_page: int) -> list[bytes]:
        """Of the full pages: a cache may find no other."""
        full = self.num_tokens // (BLOCK_SIZE * blocks_per_page)
        return [
            digest_of(
                [(self.text(i), i) for i in range(page * blocks_per_page, (page + 1) * blocks_per_page)]
            )
            for page in range(full)
        ]

    @property
    def tokens_digest(self) -> bytes:
        return f"{self.request}/{self.num_tokens}/{self.delivered}".encode()


def digest_of(blocks: Iterable[tuple[str, int]]) -> bytes:
    return " ".join(f"{text}/{block}" for text, block in blocks).encode()


class Token(NamedTuple):
    """What a token's id stands for: which attempt sampled it, after which tokens of the answer."""

    name: Name
    history: tuple[int, ...]


@dataclass(slots=True)
class Hit:
    """A beginning of a prompt that a cache has: for each token group its pages, None where nothing is needed
    any more, and the pages of the state behind it. The caller has a reference on each."""

    num_pages: int
    tables: list[list[int | None]]
    state: list[int]

    @property
    def held(self) -> list[int]:
        return held_pages(self.tables, self.state)


def held_pages(tables: Sequence[Sequence[int | None]], state: Sequence[int]) -> list[int]:
    return [*(page for table in tables for page in table if page is not None), *state]


class Memory:
    """A pool of pages, and their content by block, placed as on a link: the larger pages of a ring hold
    several blocks each. ``touched`` counts, per place, transfers that may still read or write."""

    def __init__(
        self, label: str, num_pages: int, blocks_per_page: int, groups: Sequence[KVGroup] = (FULL,)
    ) -> None:
        self.label = label
        self.per_page = blocks_per_page
        self.page_tokens = BLOCK_SIZE * blocks_per_page
        self.groups = tuple(groups)
        self.token_groups = [(n, g) for n, g in enumerate(groups) if isinstance(g.kv, TokenKV)]
        self.state = next(((n, g) for n, g in enumerate(groups) if isinstance(g.kv, StateKV)), None)
        self.pool = BlockPool(num_pages, BLOCK_SIZE * blocks_per_page)
        self.content: list[Content | None] = [None] * (num_pages * blocks_per_page)
        self.touched: Counter[int] = Counter()
        self._writes = 0

    def blocks(self, pages: Iterable[int]) -> list[int]:
        return [page * self.per_page + i for page in pages for i in range(self.per_page)]

    def touches(self, page: int) -> bool:
        return any(self.touched[block] for block in self.blocks([page]))

    def allocate(self, n: int) -> list[int] | None:
        """Blocks of the pool, which must give none that a transfer may still touch."""
        pages = self.pool.allocate(n)
        for page in pages or []:
            require(not self.touches(page), f"{self.label} granted page {page}, which a transfer may touch")
        return pages

    def cached(self, number: int, digest: bytes) -> int | None:
        """The page of a token group that the cache has under a digest, with its content checked."""
        page = self.pool.find(digest + bytes([number]))
        if page is not None:
            held = [self.content[block] for block in self.blocks([page])]
            require(None not in held, f"{self.label} found empty page {page} in its cache")
            found = digest_of((c.text, c.block) for c in held if c is not None)
            require(found == digest, f"{self.label} found {found!r} in its cache under {digest!r}")
        return page

    def cached_state(self, prompt: Prompt, num_blocks: int) -> list[int] | None:
        """The pages of a snapshot of the state behind so many blocks."""
        assert self.state is not None
        number, group = self.state
        keys = self._state_keys(prompt, num_blocks)
        pages = [page for key in keys if (page := self.pool.find(key)) is not None]
        if len(pages) < len(keys):
            return None
        for page in pages:
            held = self.content[page * self.per_page]
            right = held is not None and (held.text, held.block, held.group) == prompt.content(
                number, group, num_blocks
            )
            require(right, f"{self.label} found {held} in its cache as a state behind {num_blocks} blocks")
        return pages

    def _state_keys(self, prompt: Prompt, num_blocks: int) -> list[bytes]:
        assert self.state is not None
        number, group = self.state
        return [prompt.state_digest(num_blocks) + bytes([number, i]) for i in range(len(group.tables))]

    def match(self, prompt: Prompt, limit: int, one_group: bool = False) -> Hit:
        """The longest beginning of a prompt, of ``limit`` blocks at most, with which every group can go on.
        ``one_group``: plant a fault, and ask the first one alone."""
        digests = prompt.digests(self.per_page)[: limit // self.per_page]
        for end in range(len(digests), 0, -1):
            hit = self._match_to(prompt, digests, end, one_group)
            if hit is not None:
                self.pool.ref(hit.held)
                return hit
        return Hit(0, [[] for _ in self.token_groups], [])

    def _match_to(self, prompt: Prompt, digests: list[bytes], end: int, one_group: bool) -> Hit | None:
        tables: list[list[int | None]] = []
        for number, group in self.token_groups:
            first = needed_blocks(group, end * self.page_tokens, self.page_tokens).start
            pages = [self.cached(number, digests[page]) for page in range(first, end)]
            if None in pages and not (one_group and number):
                return None
            tables.append([*[None] * first, *pages])
        state: list[int] | None = []
        if self.state is not None:
            state = self.cached_state(prompt, end * self.per_page)
            if state is None and not one_group:
                return None
        return Hit(end, tables, state or [])

    def compute(self, at: int, text: str, block: int, group: int = 0) -> None:
        """The engine of this worker writes a block's KV."""
        page = at // self.per_page
        require(not self.pool.allocatable(page), f"{self.label} computes into page {page}, held by nobody")
        require(not self.touched[at], f"{self.label} changes block {at} while a transfer may touch it")
        self.put(at, text, block, group)

    def put(self, at: int, text: str, block: int, group: int = 0) -> None:
        self._writes += 1
        self.content[at] = Content(text, block, self._writes, group)

    def checksum(self, blocks: Iterable[int]) -> int:
        return hash(tuple(self.content[place_of(block)] for block in blocks))

    def index(self, number: int, first: int, pages: Sequence[int | None], prompt: Prompt) -> None:
        """Enter those of a token group's pages, from the prompt's page ``first`` on, that are full."""
        for page, digest in zip(pages, prompt.digests(self.per_page)[first:], strict=False):
            if page is not None:
                self.pool.commit(page, digest + bytes([number]))

    def index_state(self, pages: Sequence[int], prompt: Prompt) -> None:
        """Enter the state behind a whole prompt, if that fills its pages."""
        if self.state is not None and prompt.num_tokens % self.page_tokens == 0:
            keys = self._state_keys(prompt, prompt.num_blocks)
            for page, key in zip(pages, keys, strict=True):
                self.pool.commit(page, key)


@dataclass(slots=True)
class Transfer:
    """One message on the data connection: prefill's send, decode's receive and what is between."""

    link: LinkId
    tag: int
    name: Name
    target: tuple[int, ...]
    source: tuple[int, ...] | None = None
    checksum: int | None = None
    read: list[Content | None] = field(default_factory=list)
    landed: int = 0
    matched: bool = False
    discarded: bool = False
    send_over: bool = False
    receive_over: bool = False
    cancel_asked: bool = False
    touching: bool = False
    """Counted in ``touched`` of decode's memory."""

    @property
    def arrived(self) -> bool:
        return self.landed == len(self.target)


@dataclass(slots=True)
class _Sequence:
    """A request in prefill's engine."""

    prompt: Prompt
    link_to: int
    asked: bool = False
    running: bool = False
    held: bool = False
    tables: list[list[int | None]] = field(default_factory=list)
    """The table of each token group; None where a page was given back."""
    state: list[int] = field(default_factory=list)
    computed: int = 0
    published: int = 0
    """How much of it the service has heard of."""

    @property
    def pages(self) -> list[int]:
        return held_pages(self.tables, self.state)


class _Source:
    """``SourcePages`` of a simulated prefill worker."""

    def __init__(self, memory: Memory, sequences: dict[Name, _Sequence], early_state: bool) -> None:
        self._memory = memory
        self._sequences = sequences
        self._early_state = early_state

    def finished(self, name: Name, blocks_per_page: int) -> tuple[GroupBlocks, ...]:
        require(blocks_per_page == self._memory.per_page, f"{name} is asked for in other blocks")
        sequence = self._sequences.get(name)
        if sequence is None or not sequence.tables:
            return ()
        gone = [next((i for i, p in enumerate(t) if p is not None), len(t)) for t in sequence.tables]
        return finished_blocks(
            self._memory.groups,
            [[0 if page is None else page for page in table] for table in sequence.tables],
            sequence.state,
            gone,
            sequence.computed,
            blocks_per_page,
            whole=sequence.held or self._early_state,
        )

    def pin(self, pages: tuple[int, ...]) -> None:
        self._memory.pool.pin(pages)

    def unpin(self, pages: tuple[int, ...]) -> None:
        self._memory.pool.unpin(pages)


class _Room:
    """``Room`` of a simulated decode worker. Knows which pages were bound for whom, and are pinned."""

    def __init__(self, memory: Memory, prompt_of: Callable[[Name], Prompt]) -> None:
        self.memory = memory
        self.reserved: dict[Name, int] = {}
        self.pinned_for: dict[int, Name] = {}
        self.arriving: dict[Name, Arriving] = {}
        """The pages of what was bound last."""
        self._prompt_of = prompt_of

    def _need(self, num_tokens: int) -> int:
        """Pages of all groups."""
        size = self.memory.page_tokens
        return sum(len(needed_blocks(g, num_tokens, size)) * len(g.tables) for g in self.memory.groups)

    def fits(self, num_tokens: int) -> bool:
        return self._need(num_tokens) <= self.memory.pool.num_blocks

    def reserve(self, name: Name, num_tokens: int) -> bool:
        need = self._need(num_tokens)
        if need > self.memory.pool.num_allocatable - sum(self.reserved.values()):
            return False
        require(name not in self.reserved, f"room was promised to {name} twice")
        self.reserved[name] = need
        return True

    def unreserve(self, name: Name) -> None:
        require(name in self.reserved, f"a promise to {name} was taken back that was not made")
        del self.reserved[name]

    def bind(self, name: Name, blocks_per_page: int) -> Binding | None:
        """What the cache has of a group is used, whatever it lacks of others."""
        memory, prompt = self.memory, self._prompt_of(name)
        require(blocks_per_page == memory.per_page, f"{name} is bound in other blocks")
        cached = [self._cached(number, group, prompt) for number, group in enumerate(memory.groups)]
        shared = [page for _, pages in cached for page in pages if page is not None]
        memory.pool.ref(shared)
        fresh = memory.allocate(self.reserved[name] - len(shared))
        if fresh is None:
            memory.pool.free(shared)
            return None
        supply = iter(fresh)
        bound = [
            self._bound(group, first, pages, supply)
            for group, (first, pages) in zip(memory.groups, cached, strict=True)
        ]
        sizes = (prompt.num_tokens, memory.page_tokens, blocks_per_page)
        arriving = with_partial_blocks(Arriving(tuple(bound)), *sizes)
        binding = arriving_binding(arriving, *sizes)
        memory.pool.pin(binding.pinned)
        self.unreserve(name)
        self.arriving[name] = arriving
        self.pinned_for.update(dict.fromkeys(binding.pinned, name))
        return binding

    def _cached(self, number: int, group: KVGroup, prompt: Prompt) -> tuple[int, list[int | None]]:
        """The first block that is needed, and the cached pages from there on, None where there is none."""
        memory = self.memory
        if isinstance(group.kv, StateKV):
            whole = prompt.num_tokens % memory.page_tokens == 0
            pages = memory.cached_state(prompt, prompt.num_blocks) if whole else None
            return 0, [*pages] if pages is not None else [None] * len(group.tables)
        needed = needed_blocks(group, prompt.num_tokens, memory.page_tokens)
        digests = prompt.digests(memory.per_page)
        found = [memory.cached(number, digests[page]) if page < len(digests) else None for page in needed]
        if not group.kv.window and None in found:  # a prefix
            end = found.index(None)
            found[end:] = [None] * (len(found) - end)
        return needed.start, found

    @staticmethod
    def _bound(group: KVGroup, first: int, cached: list[int | None], supply: Iterator[int]) -> ArrivingGroup:
        blocks = (first + i for i, page in enumerate(cached) if page is None)
        missing = runs_of(sorted({0 if isinstance(group.kv, StateKV) else block for block in blocks}))
        pages = tuple(next(supply) if page is None else page for page in cached)
        return ArrivingGroup(group, first, pages, missing)

    def unpin(self, pages: tuple[int, ...]) -> None:
        for page in pages:
            require(page in self.pinned_for, f"page {page} was unpinned twice")
            del self.pinned_for[page]
        self.memory.pool.unpin(pages)

    def free(self, name: Name, pages: tuple[int, ...]) -> None:
        self.memory.pool.free(pages)

    def manifest(self, name: Name) -> tuple[int, bytes, int]:
        prompt = self._prompt_of(name)
        return prompt.num_tokens, prompt.tokens_digest, 1


@dataclass(slots=True)
class Prefill:
    """One process start of a prefill worker."""

    incarnation: str
    memory: Memory
    sequences: dict[Name, _Sequence]
    machine: PrefillHandoffs
    links: dict[LinkId, None] = field(default_factory=dict)
    """Not known to be lost."""
    others: list[list[int]] = field(default_factory=list)
    """Pages of requests that have nothing to do with handoffs."""


@dataclass(slots=True)
class Decode:
    """One process start of a decode worker."""

    incarnation: str
    memory: Memory
    room: _Room
    machine: DecodeHandoffs
    links: dict[LinkId, None] = field(default_factory=dict)
    """Neither lost nor fenced."""
    fencing: dict[LinkId, None] = field(default_factory=dict)
    committed: dict[Name, tuple[int, ...]] = field(default_factory=dict)
    answers: dict[Name, tuple[int, ...]] = field(default_factory=dict)
    """The answer of each of them so far."""
    ended: set[Name] = field(default_factory=set)
    """Cancelled by the router, or said to have failed."""
    retiring: bool = False
    others: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class _Stream:
    """One direction of a link's control stream."""

    queue: deque[ToDecode | ToPrefill] = field(default_factory=deque)
    delivered: deque[ToDecode | ToPrefill] = field(default_factory=lambda: deque(maxlen=REPLAYED))


@dataclass(slots=True)
class _Attempt:
    prompt: Prompt
    prefill: int
    decode: int
    over: bool = False
    """The router has given it up, or will."""
    passed: bool = False
    """The router has heard of it from decode: what becomes of prefill matters no more."""


@dataclass(frozen=True, slots=True)
class WorldConfig:
    prefills: int = 1
    decodes: int = 1
    requests: int = 3
    prefill_blocks: int = 10
    decode_blocks: int = 10
    one_sided: bool = False
    """Prefill writes into decode's memory: a send is over when it has landed, and nothing that decode does
    short of a fence keeps it from landing."""
    prefill_per_page: int = 1
    decode_per_page: int = 1
    """Blocks in a page of each side; one of the two is 1."""
    groups: tuple[KVGroup, ...] = (FULL,)
    early_state: bool = False
    """A planted fault: prefill takes a state for finished that it still changes."""
    hits_of_one_group: bool = False
    """A planted fault: prefill begins behind what its cache has of the first group."""
    verify: bool = False
    """Checksums are compared, and blocks may change on the way."""
    ordered: bool = False
    """Messages of a link move one after the other, as on a socket."""
    decode_machine: type[DecodeHandoffs] = DecodeHandoffs
    prefill_machine: type[PrefillHandoffs] = PrefillHandoffs
    entry: type[LedgerEntry] = LedgerEntry


class World:
    """See the module. ``EVENTS`` names the methods that a driver may call, each with a number."""

    EVENTS: ClassVar[dict[str, int]] = {
        "submit": 5,
        "connect": 8,
        "ask": 8,
        "deliver": 60,
        "repeat": 4,
        "replay": 2,
        "lose": 1,
        "garble_grant": 1,
        "compute": 40,
        "publish": 25,
        "preempt": 2,
        "read_page": 40,
        "end_send": 25,
        "match": 25,
        "land_page": 40,
        "corrupt": 2,
        "end_receive": 25,
        "cancel_receive_now": 10,
        "cancel": 4,
        "deliver_cancel": 8,
        "stall": 1,
        "generate": 12,
        "deliver_frame": 20,
        "repeat_frame": 2,
        "lose_frames": 1,
        "others_take": 6,
        "others_leave": 8,
        "tick": 6,
        "break_data": 1,
        "break_control": 1,
        "notice_at_prefill": 4,
        "notice_at_decode": 4,
        "end_fence": 4,
        "crash_prefill": 1,
        "crash_decode": 1,
    }
    """With how often each should come, relatively."""

    def __init__(self, config: WorldConfig) -> None:
        self.config = config
        self.now = 0.0
        self.commits: Counter[Name] = Counter()
        self._starts = 0
        self.steps = 0
        self._prompts: dict[str, Prompt] = {}
        self._entries: dict[str, LedgerEntry] = {}
        self.clients: dict[str, list[int]] = {}
        """The tokens that each request's client was given."""
        self._tokens: list[Token] = []
        self._frames: dict[str, deque[worker_pb2.Frame]] = {}
        """What each process start has under way to the router, in order."""
        self._current = [self._new_prompt() for _ in range(config.requests)]
        self._attempts: dict[Name, _Attempt] = {}
        self._cancels: list[tuple[Name, str]] = []
        self._streams: dict[tuple[LinkId, str], _Stream] = {}
        self._transfers: dict[tuple[LinkId, int], Transfer] = {}
        self._broken: dict[LinkId, set[str]] = {}
        """Links with a dead connection, and the sides that have not noticed."""
        self.prefills = [self._start_prefill() for _ in range(config.prefills)]
        self.decodes = [self._start_decode() for _ in range(config.decodes)]

    def _new_prompt(self) -> Prompt:
        i = len(self._prompts)
        blocks, shared = 1 + (i * 2 + 2) % 5, (0, 2, 3)[i % 3]
        prompt = Prompt(f"r{i}", blocks, shared, partial=i % 2 == 0)
        self._prompts[prompt.request] = prompt
        self._entries[prompt.request] = self.config.entry()
        self.clients[prompt.request] = []
        return prompt

    def _workers(self) -> list[Prefill | Decode]:
        return [*self.prefills, *self.decodes]

    def prompt_of(self, name: Name) -> Prompt:
        return self._attempts[name].prompt

    def _incarnation(self, role: str) -> str:
        self._starts += 1
        return f"{role}{self._starts}"

    def _start_prefill(self) -> Prefill:
        incarnation = self._incarnation("P")
        config = self.config
        memory = Memory(incarnation, config.prefill_blocks, config.prefill_per_page, config.groups)
        sequences: dict[Name, _Sequence] = {}
        machine = config.prefill_machine(_Source(memory, sequences, config.early_state))
        return Prefill(incarnation, memory, sequences, machine)

    def _start_decode(self) -> Decode:
        incarnation = self._incarnation("D")
        config = self.config
        memory = Memory(incarnation, config.decode_blocks, config.decode_per_page, config.groups)
        room = _Room(memory, self.prompt_of)
        machine = self.config.decode_machine(
            incarnation, room, drained_is_proof=self.config.one_sided, max_queued=4
        )
        return Decode(incarnation, memory, room, machine)

    # --- driving

    def step(self, event: str, number: int) -> bool:
        """One event. False: there was nothing for it to happen to."""
        method: Callable[[Picker], bool] = getattr(self, event)
        happened = method(Picker(number))
        if happened:
            self.steps += 1
            self.check()
        return happened

    def advance(self, seed: int, steps: int) -> None:
        """Let ``steps`` events happen by chance."""
        rng = random.Random(seed)
        events, weights = list(self.EVENTS), list(self.EVENTS.values())
        end = self.steps + steps
        while self.steps < end:
            for event in rng.choices(events, weights, k=steps):
                self.step(event, rng.getrandbits(40))

    def check(self) -> None:
        """What must hold between any two events."""
        for worker in self._workers():
            pins = Counter(worker.machine.pinned_pages())
            pool = worker.memory.pool
            for page in range(pool.num_blocks):
                require(
                    pool.pins(page) == pins[page],
                    f"page {page} of {worker.incarnation} has {pool.pins(page)} pins, "
                    f"of which its handoffs know {pins[page]}",
                )
                if worker.memory.touches(page):
                    require(not pool.allocatable(page), f"page {page} is free while a transfer may touch it")

        for decode in self.decodes:
            for name in decode.room.reserved:
                state = decode.machine.state_of(name)
                require(state is DecodeHandoffState.RESERVED, f"room is promised to {name}, which is {state}")

    # --- the router

    def submit(self, pick: Picker) -> bool:
        """A request's first attempt, or another one: the router may think the worst of the current one. That
        goes on from the tokens delivered until now, whatever more of the current one's is under way."""
        place = pick.below(len(self._current))
        tries = [n for n in self._attempts if n.request_id == self._current[place].request]
        if len(tries) == ATTEMPTS or self._entries[self._current[place].request].finished:
            self._current[place], tries = self._new_prompt(), []
        request = self._current[place].request
        name, entry = Name(request, len(tries)), self._entries[request]
        entry.attempt = name.attempt
        prompt = replace(self._prompts[request], delivered=tuple(entry.output_ids))
        prefill, decode = pick.below(len(self.prefills)), pick.below(len(self.decodes))
        self._attempts[name] = _Attempt(prompt, prefill, decode)
        self.prefills[prefill].sequences[name] = _Sequence(prompt, decode)
        for older in tries:
            self._give_up(older)
        return True

    def cancel(self, pick: Picker) -> bool:
        if not self._attempts:
            return False
        self._give_up(pick.of(list(self._attempts)[-3 * self.config.requests :]))
        return True

    def _give_up(self, name: Name) -> None:
        self._attempts[name].over = True
        self._cancels += [(name, "prefill"), (name, "decode")]

    def deliver_cancel(self, pick: Picker) -> bool:
        """Any one that is under way, sometimes without being taken off it: it will come again."""
        if not self._cancels:
            return False
        chosen = pick.below(len(self._cancels))
        name, side = self._cancels[chosen]
        if pick.below(4):
            del self._cancels[chosen]
        attempt = self._attempts[name]
        if side == "prefill":
            prefill = self.prefills[attempt.prefill]
            self._at_prefill(prefill, prefill.machine.cancel(name, self.now))
            self._drop(prefill, name)
        else:
            decode = self.decodes[attempt.decode]
            decode.ended.add(name)
            self._at_decode(decode, decode.machine.cancel(name, self.now))
            self._finish(decode, name)
        return True

    # --- tokens on their way to the client

    def _sample(self, name: Name, history: tuple[int, ...]) -> int:
        self._tokens.append(Token(name, history))
        return len(self._tokens) - 1

    def _tell_router(self, incarnation: str, deltas: list[worker_pb2.TokenDelta]) -> None:
        self._frames.setdefault(incarnation, deque()).append(worker_pb2.Frame(deltas=deltas))

    def _tell_failure(self, incarnation: str, name: Name) -> None:
        error = inference_pb2.FINISH_REASON_ERROR
        delta = worker_pb2.TokenDelta(
            request_id=name.request_id, attempt=name.attempt, finish_reason=error, error="failed"
        )
        self._tell_router(incarnation, [delta])

    @staticmethod
    def _delta(name: Name, answer: tuple[int, ...]) -> worker_pb2.TokenDelta:
        """The last token of an answer."""
        ended, goes_on = inference_pb2.FINISH_REASON_LENGTH, inference_pb2.FINISH_REASON_UNSPECIFIED
        return worker_pb2.TokenDelta(
            request_id=name.request_id,
            attempt=name.attempt,
            first_seq=len(answer) - 1,
            token_ids=answer[-1:],
            finish_reason=ended if len(answer) == ANSWER else goes_on,
        )

    def deliver_frame(self, pick: Picker) -> bool:
        """The router reads from one of its streams; between two of them there is no order."""
        options = [incarnation for incarnation, frames in self._frames.items() if frames]
        if not options:
            return False
        incarnation = pick.of(options)
        self._take_frame(incarnation, self._frames[incarnation].popleft())
        return True

    def repeat_frame(self, pick: Picker) -> bool:
        """A frame comes, and comes again in its turn."""
        options = [incarnation for incarnation, frames in self._frames.items() if frames]
        if not options:
            return False
        incarnation = pick.of(options)
        self._take_frame(incarnation, self._frames[incarnation][0])
        return True

    def lose_frames(self, pick: Picker) -> bool:
        """The stream of a worker to the router breaks, and with it go the last frames under way."""
        worker = pick.of(self._workers())
        self._cut_frames(worker.incarnation, pick)
        side = "decode" if isinstance(worker, Decode) else "prefill"
        places: list[Prefill] | list[Decode] = self.decodes if side == "decode" else self.prefills
        self._worker_lost(side, next(i for i, w in enumerate(places) if w is worker))
        return True

    def _cut_frames(self, incarnation: str, pick: Picker) -> None:
        frames = self._frames.get(incarnation, deque())
        for _ in range(pick.below(len(frames) + 1)):
            frames.pop()

    def _take_frame(self, incarnation: str, frame: worker_pb2.Frame) -> None:
        for delta in frame.deltas:
            name, entry = Name(delta.request_id, delta.attempt), self._entries[delta.request_id]
            if incarnation.startswith("D"):
                self._attempts[name].passed = True
            accepted = entry.accept(delta)
            if isinstance(accepted, TokenChunk):
                self._give_client(name.request_id, accepted)
            elif accepted is not None:
                self._give_up(name)

    def _give_client(self, request: str, chunk: TokenChunk) -> None:
        """Each position once, in order, and sampled after exactly the tokens that are before it."""
        client = self.clients[request]
        for token_id in chunk.token_ids:
            require(token_id < len(self._tokens), f"{request} is given a token that nobody sampled")
            name, history = self._tokens[token_id]
            at = len(client)
            require(name.request_id == request, f"{request} is given a token of {name}")
            require(len(history) == at, f"{name}'s token for position {len(history)} is delivered at {at}")
            require(history == tuple(client), f"{name}'s token {at} follows tokens it was not sampled after")
            client.append(token_id)
        if chunk.finish_reason is not None:
            require(len(client) == ANSWER, f"{request} ended after {len(client)} of {ANSWER} tokens")

    # --- prefill's engine and service

    def ask(self, pick: Picker) -> bool:
        """A request goes to the state machine, once there is a link to its decode worker."""
        options = [
            (prefill, name, link)
            for prefill in self.prefills
            for name, sequence in prefill.sequences.items()
            if not sequence.asked
            for link in prefill.links
            if link.decode == self.decodes[sequence.link_to].incarnation
        ]
        if not options:
            return False
        prefill, name, link = pick.of(options)
        sequence = prefill.sequences[name]
        sequence.asked = True
        num_tokens = sequence.prompt.num_tokens
        wanted = wanted_blocks(self.config.groups, num_tokens, BLOCK_SIZE)
        self._at_prefill(prefill, prefill.machine.ask(name, link, num_tokens, wanted, self.now))
        return True

    def _running(self) -> list[tuple[Prefill, Name]]:
        return [(p, name) for p in self.prefills for name, s in p.sequences.items() if s.running]

    def compute(self, pick: Picker) -> bool:
        """A step of one sequence: blocks are bound for it, or the KV of one is computed."""
        options = [(p, name) for p, name in self._running() if not p.sequences[name].held]
        if not options:
            return False
        prefill, name = pick.of(options)
        sequence, memory = prefill.sequences[name], prefill.memory
        prompt = sequence.prompt
        if not sequence.pages and not self._begin(sequence, memory):
            return self._preempt_for(prefill, name, pick)
        bound = len(sequence.tables[0])
        if sequence.computed == bound * memory.per_page:
            missing = -(-prompt.num_blocks // memory.per_page) - bound
            count = min(missing, 1 + pick.below(3))
            fresh = memory.allocate(count * len(sequence.tables))
            if fresh is None:
                return self._preempt_for(prefill, name, pick)
            for number, table in enumerate(sequence.tables):
                table += fresh[number * count : (number + 1) * count]
            return True
        self._compute_block(sequence, memory)
        return True

    def _begin(self, sequence: _Sequence, memory: Memory) -> bool:
        """Take what the cache has of a prompt. False: there is no room for its state."""
        prompt = sequence.prompt
        hit = memory.match(prompt, prompt.num_blocks - 1, self.config.hits_of_one_group)
        if memory.state is not None:
            number, group = memory.state
            live = memory.allocate(len(group.tables))
            if live is None:
                memory.pool.free(hit.held)
                return False
            for page, snapshot in zip(live, hit.state, strict=False):
                copied = memory.content[snapshot * memory.per_page]
                assert copied is not None
                memory.compute(page * memory.per_page, copied.text, copied.block, number)
            memory.pool.free(hit.state)
            sequence.state = live
        sequence.tables, sequence.computed = hit.tables, hit.num_pages * memory.per_page
        return True

    def _compute_block(self, sequence: _Sequence, memory: Memory) -> None:
        """Compute a block of every group, and give back what no later token sees."""
        prompt, block, per_page = sequence.prompt, sequence.computed, memory.per_page
        self._check_seen(sequence, memory)
        for (number, group), table in zip(memory.token_groups, sequence.tables, strict=True):
            page = table[block // per_page]
            assert page is not None
            text, at, _ = prompt.content(number, group, block)
            memory.compute(page * per_page + block % per_page, text, at, number)
        if memory.state is not None:
            number, group = memory.state
            for page in sequence.state:
                text, at, _ = prompt.content(number, group, block + 1)
                memory.compute(page * per_page, text, at, number)
        sequence.computed += 1
        sequence.held = sequence.computed == prompt.num_blocks
        full = sequence.computed // per_page
        for (number, group), table in zip(memory.token_groups, sequence.tables, strict=True):
            memory.index(number, 0, table[:full], prompt)
            num_tokens = min(sequence.computed * BLOCK_SIZE, prompt.num_tokens)
            for gone in range(needed_blocks(group, num_tokens, memory.page_tokens).start):
                page, table[gone] = table[gone], None
                if page is not None:
                    memory.pool.free([page])
        if sequence.held:
            memory.index_state(sequence.state, prompt)

    @staticmethod
    def _check_seen(sequence: _Sequence, memory: Memory) -> None:
        """Require that every group has what a block's first token sees."""
        prompt, block, per_page = sequence.prompt, sequence.computed, memory.per_page
        for (number, group), table in zip(memory.token_groups, sequence.tables, strict=True):
            for seen in needed_blocks(group, block * BLOCK_SIZE, BLOCK_SIZE):
                page = table[seen // per_page]
                held = None if page is None else memory.content[page * per_page + seen % per_page]
                right = held is not None and (held.text, held.block, held.group) == prompt.content(
                    number, group, seen
                )
                require(right, f"{memory.label} goes on with {held} as block {seen} of group {number}")
        if memory.state is not None and block:
            number, group = memory.state
            for page in sequence.state:
                held = memory.content[page * per_page]
                right = held is not None and (held.text, held.block, held.group) == prompt.content(
                    number, group, block
                )
                require(right, f"{memory.label} goes on with {held} as the state behind block {block}")

    def _preempt_for(self, prefill: Prefill, name: Name, pick: Picker) -> bool:
        """A sequence finds the pool full: a later arrival makes room, or it waits."""
        names = list(prefill.sequences)
        later = names[names.index(name) + 1 :]
        victims = [n for n in later if prefill.sequences[n].pages and not prefill.sequences[n].held]
        if victims:
            self._preempt(prefill, pick.of(victims))
        return bool(victims)

    def preempt(self, pick: Picker) -> bool:
        """A sequence loses its pages in the middle of its prompt, and starts over in others."""
        victims = [
            (p, name) for p, name in self._running() if p.sequences[name].pages and not p.sequences[name].held
        ]
        if victims:
            self._preempt(*pick.of(victims))
        return bool(victims)

    @staticmethod
    def _preempt(prefill: Prefill, name: Name) -> None:
        sequence = prefill.sequences[name]
        prefill.memory.pool.free(sequence.pages)
        sequence.tables, sequence.state, sequence.computed = [], [], 0

    def publish(self, pick: Picker) -> bool:
        """The service hears, late, that a step has computed something."""
        news = [(p, n) for p, n in self._running() if p.sequences[n].computed != p.sequences[n].published]
        if not news:
            return False
        prefill, name = pick.of(news)
        sequence = prefill.sequences[name]
        sequence.published = sequence.computed
        actions = self._held(prefill, name) if sequence.held else prefill.machine.progress(name)
        self._at_prefill(prefill, actions)
        return True

    def _held(self, prefill: Prefill, name: Name) -> list[Action]:
        """The whole prompt is computed, and the first token sampled. The router hears of it at once; if it is
        the last one too, there is nothing to hand on."""
        prompt = prefill.sequences[name].prompt
        token = self._sample(name, prompt.delivered)
        answer = (*prompt.delivered, token)
        self._tell_router(prefill.incarnation, [self._delta(name, answer)])
        if len(answer) == ANSWER:
            self._attempts[name].over = True
            return prefill.machine.withdraw(name, "finished", self.now)
        computed = Computed(prompt.num_tokens, prompt.tokens_digest, (First(token),), cached_tokens=0)
        return prefill.machine.computed(name, computed)

    @staticmethod
    def _drop(prefill: Prefill, name: Name) -> None:
        """The engine forgets a request and frees its blocks."""
        sequence = prefill.sequences.pop(name, None)
        if sequence is not None:
            prefill.memory.pool.free(sequence.pages)

    def _at_prefill(self, prefill: Prefill, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(link=link, message=message):
                    self._post(link, "to decode", message)
                case SendBlocks():
                    self._start_send(prefill, action)
                case Compute(name=name):
                    prefill.sequences[name].running = True
                case Stop(name=name):
                    self._drop(prefill, name)
                case Fail(name=name):
                    self._drop(prefill, name)
                    self._tell_failure(prefill.incarnation, name)
                case _:
                    raise ViolationError(f"prefill cannot do {action}")

    # --- decode's engine and service

    def generate(self, pick: Picker) -> bool:
        """A step of a decode engine: one more token for each of its requests, all in one frame."""
        options = [d for d in self.decodes if d.answers]
        if not options:
            return False
        decode = pick.of(options)
        deltas = []
        for name, answer in list(decode.answers.items()):
            longer = decode.answers[name] = (*answer, self._sample(name, answer))
            deltas.append(self._delta(name, longer))
            if len(longer) == ANSWER:
                self._finish(decode, name)
        self._tell_router(decode.incarnation, deltas)
        return True

    def _finish(self, decode: Decode, name: Name) -> None:
        decode.answers.pop(name, None)
        pages = decode.committed.pop(name, None)
        if pages is not None:
            decode.memory.pool.free(pages)
            self._at_decode(decode, decode.machine.pump(self.now))

    def _commit(self, decode: Decode, commit: Commit) -> None:
        name, prompt = commit.name, self.prompt_of(commit.name)
        self.commits[name] += 1
        require(self.commits[name] == 1, f"{name} was committed twice")
        require(name not in decode.ended, f"{name} was committed after it had been cancelled or had failed")
        newer = [
            n for n in decode.ended | set(decode.committed) if n.request_id == name.request_id and n > name
        ]
        require(not newer, f"{name} was committed after {newer}")
        memory, binding, arriving = decode.memory, commit.binding, decode.room.arriving[name]
        for number, group in enumerate(memory.groups):
            self._check_committed(memory, commit, number, group, prompt)
        for page in binding.pages:
            require(memory.pool.refs(page) > 0, f"{name} was committed with page {page}, not its own")
        decode.committed[name] = binding.pages
        for number, bound in enumerate(arriving.groups):
            if isinstance(bound.group.kv, StateKV):
                memory.index_state(bound.pages, prompt)
            else:
                skip = int(bound.partial)
                memory.index(number, bound.first + skip, bound.pages[skip:], prompt)
        answer = decode.answers[name] = (*prompt.delivered, commit.firsts[0].token)
        self._tell_router(decode.incarnation, [self._delta(name, answer)])

    @staticmethod
    def _check_committed(memory: Memory, commit: Commit, number: int, group: KVGroup, prompt: Prompt) -> None:
        """Every block of a group that a token behind the prompt needs is there, and nothing writes to it."""
        name, bound = commit.name, commit.binding.groups[number]
        for block in needed_blocks(group, prompt.num_tokens, BLOCK_SIZE):
            counted = block if isinstance(group.kv, TokenKV) else prompt.num_blocks
            for at in map(place_of, bound.names_of(block, block + 1)):
                held = memory.content[at]
                right = held is not None and (held.text, held.block, held.group) == prompt.content(
                    number, group, counted
                )
                require(right, f"{name} was committed with {held} as its block {block} of group {number}")
                require(not memory.touched[at], f"{name} was committed while block {at} is written")

    def _at_decode(self, decode: Decode, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(link=link, message=message):
                    self._post(link, "to prefill", message)
                case PostReceive():
                    self._post_receive(decode, action)
                case CancelReceive(link=link, tag=tag):
                    self._transfers[link, tag].cancel_asked = True
                case Commit():
                    self._commit(decode, action)
                case Fail(name=name):
                    require(not self.commits[name], f"{name} has failed after it had been committed")
                    decode.ended.add(name)
                    self._tell_failure(decode.incarnation, name)
                case Stop():
                    pass
                case Fence(link=link):
                    require(link not in decode.fencing, f"{link} is fenced twice")
                    decode.fencing[link] = None
                    decode.links.pop(link, None)
                    self._break(link, noticed_by="decode")
                case Retire():
                    decode.retiring = True
                case _:
                    raise ViolationError(f"decode cannot do {action}")

    # --- requests that have nothing to do with handoffs

    def others_take(self, pick: Picker) -> bool:
        worker = pick.of(self._workers())
        pages = worker.memory.allocate(1 + pick.below(4))
        if pages is None:
            return False
        for block in worker.memory.blocks(pages):
            worker.memory.compute(block, "other", 0)
        worker.others.append(pages)
        return True

    def others_leave(self, pick: Picker) -> bool:
        workers = [w for w in self._workers() if w.others]
        if not workers:
            return False
        worker = pick.of(workers)
        worker.memory.pool.free(worker.others.pop(pick.below(len(worker.others))))
        if isinstance(worker, Decode):
            self._at_decode(worker, worker.machine.pump(self.now))
        return True

    # --- the control streams

    def _post(self, link: LinkId, way: str, message: ToDecode | ToPrefill) -> None:
        stream = self._streams.get((link, way))
        if stream is not None:
            stream.queue.append(message)

    def deliver(self, pick: Picker) -> bool:
        options = [key for key, stream in self._streams.items() if stream.queue]
        if not options:
            return False
        key = pick.of(options)
        stream = self._streams[key]
        message = stream.queue.popleft()
        stream.delivered.append(message)
        self._arrive(*key, message)
        return True

    def repeat(self, pick: Picker) -> bool:
        """A message arrives, and arrives again in its turn."""
        options = [key for key, stream in self._streams.items() if stream.queue]
        if not options:
            return False
        key = pick.of(options)
        self._arrive(*key, self._streams[key].queue[0])
        return True

    def replay(self, pick: Picker) -> bool:
        """A message that was delivered before arrives once more."""
        options = [key for key, stream in self._streams.items() if stream.delivered]
        if not options:
            return False
        key = pick.of(options)
        self._arrive(*key, pick.of(self._streams[key].delivered))
        return True

    def lose(self, pick: Picker) -> bool:
        """One message under way is lost, and nobody is told."""
        options = [key for key, stream in self._streams.items() if stream.queue]
        if not options:
            return False
        queue = self._streams[pick.of(options)].queue
        del queue[pick.below(len(queue))]
        return True

    def garble_grant(self, pick: Picker) -> bool:
        """A grant arrives with segments that could not be told apart, or hold nothing."""
        options = [
            (key, message)
            for key, stream in self._streams.items()
            if stream.queue and isinstance(message := stream.queue[0], Grant) and message.segments
        ]
        if not options:
            return False
        (link, way), grant = pick.of(options)
        first = grant.segments[0]
        wrong = [
            replace(grant, segments=(*grant.segments, first)),
            replace(grant, segments=(*grant.segments, replace(first, tag=-1, num_blocks=0))),
        ]
        prefill = self._prefill_of(link)
        taken = [
            tag
            for of, tag in self._transfers
            if of == link and prefill and prefill.machine.name_of(link, tag) not in (None, grant.name)
        ]
        if taken:
            wrong.append(replace(grant, segments=(replace(first, tag=pick.of(taken)), *grant.segments[1:])))
        wrong += self._grants_of_others(grant)
        self._streams[link, way].queue.popleft()
        self._arrive(link, way, pick.of(wrong))
        return True

    def _grants_of_others(self, grant: Grant) -> list[Grant]:
        """Grants of blocks that prefill will never have: of a group too many, of a window's past."""
        groups, num_tokens = self.config.groups, self.prompt_of(grant.name).num_tokens
        if len(groups) == 1:
            return []
        starts = [wanted.start for wanted in wanted_blocks(groups, num_tokens, BLOCK_SIZE)]
        past = [Segment(-1, 0, 1, number) for number, start in enumerate(starts) if start]
        others = [Segment(-1, 0, 1, len(groups)), *past]
        return [replace(grant, segments=(*grant.segments, other)) for other in others]

    def _arrive(self, link: LinkId, way: str, message: ToDecode | ToPrefill) -> None:
        if way == "to decode":
            for decode in self.decodes:
                if decode.incarnation == link.decode:
                    self._at_decode(decode, decode.machine.receive(link, message, self.now))  # type: ignore[arg-type]
        else:
            for prefill in self.prefills:
                if prefill.incarnation == link.prefill:
                    self._at_prefill(prefill, prefill.machine.receive(link, message, self.now))  # type: ignore[arg-type]

    # --- the data connections

    def _post_receive(self, decode: Decode, action: PostReceive) -> None:
        require(action.link in decode.links, f"{action} is posted on a link that is being fenced")
        per_page = decode.memory.per_page
        names = {decode.room.pinned_for.get(page_of(block, per_page)) for block in action.blocks}
        require(len(names) == 1 and None not in names, f"{action} goes to pages of {names}")
        name = next(name for name in names if name is not None)
        transfer = Transfer(action.link, action.tag, name, action.blocks)
        require((action.link, action.tag) not in self._transfers, f"{action} uses a tag again")
        self._transfers[action.link, action.tag] = transfer
        if not self.config.one_sided:
            self._touch(transfer)

    def _start_send(self, prefill: Prefill, action: SendBlocks) -> None:
        transfer = self._transfers.get((action.link, action.tag))
        require(transfer is not None, f"{action} has no receive")
        assert transfer is not None
        require(transfer.source is None, f"{action} is sent twice")
        require(len(transfer.target) == len(action.blocks), f"{action} has another size than its receive")
        transfer.source = action.blocks
        transfer.checksum = prefill.memory.checksum(action.blocks) if self.config.verify else None
        prefill.memory.touched.update(map(place_of, action.blocks))
        # The order on a link is that in which prefill sends.
        self._transfers[action.link, action.tag] = self._transfers.pop((action.link, action.tag))
        if self.config.one_sided:
            self._touch(transfer)

    def _touch(self, transfer: Transfer) -> None:
        decode = self._decode_of(transfer.link)
        if decode is not None and not transfer.receive_over:
            transfer.touching = True
            decode.memory.touched.update(map(place_of, transfer.target))

    def _untouch(self, transfer: Transfer) -> None:
        decode = self._decode_of(transfer.link)
        if decode is not None and transfer.touching:
            decode.memory.touched.subtract(map(place_of, transfer.target))
        transfer.touching = False

    def _prefill_of(self, link: LinkId) -> Prefill | None:
        return next((p for p in self.prefills if p.incarnation == link.prefill), None)

    def _decode_of(self, link: LinkId) -> Decode | None:
        return next((d for d in self.decodes if d.incarnation == link.decode), None)

    def _moving(self, may: Callable[[Transfer], bool]) -> list[Transfer]:
        """Transfers that may take a step; on an ordered link only the first one unfinished."""
        options: list[Transfer] = []
        busy: set[LinkId] = set()
        for transfer in self._transfers.values():
            if transfer.source is None or transfer.link in busy:
                continue
            if may(transfer):
                options.append(transfer)
            if self.config.ordered and len(transfer.read) < len(transfer.source):
                busy.add(transfer.link)
        return options

    def read_page(self, pick: Picker) -> bool:
        """One page of a send is read, at last. Prefill may think that the send is over: after an error a
        peer that fetches goes on reading until it is fenced."""

        def may(t: Transfer) -> bool:
            return (
                t.source is not None and len(t.read) < len(t.source) and self._prefill_of(t.link) is not None
            )

        options = self._moving(may)
        if not options:
            return False
        transfer = pick.of(options)
        prefill = self._prefill_of(transfer.link)
        assert transfer.source is not None and prefill is not None
        transfer.read.append(prefill.memory.content[place_of(transfer.source[len(transfer.read)])])
        return True

    def end_send(self, pick: Picker) -> bool:
        """Prefill hears that a send is over: it was read whole (and has landed, where that is a send's end),
        or the connection is dead."""

        def whole(t: Transfer) -> bool:
            assert t.source is not None
            return len(t.read) == len(t.source) and (t.arrived or not self.config.one_sided)

        options = [
            t
            for t in self._transfers.values()
            if t.source is not None
            and not t.send_over
            and self._prefill_of(t.link) is not None
            and (whole(t) or t.link in self._broken)
        ]
        if not options:
            return False
        transfer = pick.of(options)
        ok = whole(transfer) and not (transfer.link in self._broken and pick.below(2))
        self._end_send(transfer, ok)
        return True

    def _end_send(self, transfer: Transfer, ok: bool) -> None:
        prefill = self._prefill_of(transfer.link)
        assert prefill is not None and transfer.source is not None
        transfer.send_over = True
        prefill.memory.touched.subtract(map(place_of, transfer.source))
        checksum = transfer.checksum if ok else None
        self._at_prefill(prefill, prefill.machine.sent(transfer.link, transfer.tag, ok, self.now, checksum))

    def match(self, pick: Picker) -> bool:
        """A message's header reaches decode: its receive is there, or the message goes nowhere."""
        options = self._moving(lambda t: not t.matched and not t.discarded)
        if not options:
            return False
        transfer = pick.of(options)
        transfer.discarded = transfer.receive_over
        transfer.matched = not transfer.discarded
        return True

    def land_page(self, pick: Picker) -> bool:
        """One page of a matched message is written into decode's pool."""
        options = [
            t
            for t in self._transfers.values()
            if t.matched and not t.receive_over and t.landed < len(t.read) and self._decode_of(t.link)
        ]
        if not options:
            return False
        transfer = pick.of(options)
        decode = self._decode_of(transfer.link)
        assert decode is not None
        block, content = place_of(transfer.target[transfer.landed]), transfer.read[transfer.landed]
        page = block // decode.memory.per_page
        owner = decode.room.pinned_for.get(page)
        require(
            owner == transfer.name, f"{transfer.name} writes into page {page}, which is pinned for {owner}"
        )
        require(not decode.memory.pool.allocatable(page), f"{transfer.name} writes into free page {page}")
        decode.memory.content[block] = content
        transfer.landed += 1
        if transfer.arrived and self.config.one_sided:
            self._untouch(transfer)
        return True

    def corrupt(self, pick: Picker) -> bool:
        """A block changes between prefill's pages and decode's."""
        options = [t for t in self._transfers.values() if t.landed < len(t.read) and not t.receive_over]
        if not options or not self.config.verify:
            return False
        pick.of(options).read[-1] = Content("noise", 0, -1)
        return True

    def end_receive(self, pick: Picker) -> bool:
        """Decode hears that a receive is over, with all its bytes."""
        options = [
            t
            for t in self._transfers.values()
            if t.arrived and not t.receive_over and self._decode_of(t.link)
        ]
        if options:
            self._end_receive(pick.of(options), ok=True)
        return bool(options)

    def cancel_receive_now(self, pick: Picker) -> bool:
        """A cancel has an effect if nothing has matched the receive until now."""
        options = [
            t for t in self._transfers.values() if t.cancel_asked and not t.receive_over and not t.matched
        ]
        if not options or self.config.one_sided:
            return False
        self._end_receive(pick.of(options), ok=False)
        return True

    def _end_receive(self, transfer: Transfer, ok: bool) -> None:
        decode = self._decode_of(transfer.link)
        transfer.receive_over = True
        if decode is None:
            return
        self._untouch(transfer)
        checksum = decode.memory.checksum(transfer.target) if ok and self.config.verify else None
        self._at_decode(decode, decode.machine.received(transfer.link, transfer.tag, ok, self.now, checksum))

    # --- links

    def connect(self, pick: Picker) -> bool:
        """Prefill dials a decode worker to which it knows of no link."""
        options = [
            (p, d)
            for p in self.prefills
            for d in self.decodes
            if all(link.decode != d.incarnation for link in p.links)
        ]
        if not options:
            return False
        prefill, decode = pick.of(options)
        for old in [link for link in decode.links if link.prefill == prefill.incarnation]:
            self._at_decode(decode, decode.machine.link_lost(old, self.now))
        link = decode.machine.open_link(
            prefill.incarnation, decode.memory.per_page, verify=self.config.verify
        )
        if link is None:
            return False
        known = {*decode.links, *decode.fencing, *self._broken}
        require(link not in known, f"{link} was opened twice")
        decode.links[link] = None
        prefill.links[link] = None
        prefill.machine.link_opened(link, prefill.memory.per_page)
        self._streams[link, "to decode"] = _Stream()
        self._streams[link, "to prefill"] = _Stream()
        return True

    def break_data(self, pick: Picker) -> bool:
        """The data connection dies. What is under way may arrive, and will be reported, later."""
        options = self._links()
        if options:
            self._break(pick.of(options))
        return bool(options)

    def break_control(self, pick: Picker) -> bool:
        """The control stream dies, and with it some of the messages under way."""
        options = self._links()
        if not options:
            return False
        link = pick.of(options)
        for way in ("to decode", "to prefill"):
            queue = self._streams[link, way].queue
            for _ in range(pick.below(len(queue) + 1)):
                queue.pop()
        self._break(link)
        return True

    def _links(self) -> list[LinkId]:
        both = [link for w in self._workers() for link in w.links]
        return [link for link in dict.fromkeys(both) if link not in self._broken]

    def _break(self, link: LinkId, noticed_by: str | None = None) -> None:
        unaware = self._broken.setdefault(link, {"prefill", "decode"})
        unaware.discard(noticed_by or "")

    def notice_at_prefill(self, pick: Picker) -> bool:
        """Prefill hears of a broken link. Its sends may still be going on."""
        options = [
            (p, link) for p in self.prefills for link in p.links if "prefill" in self._broken.get(link, ())
        ]
        if not options:
            return False
        prefill, link = pick.of(options)
        self._broken[link].discard("prefill")
        prefill.links.pop(link, None)
        self._at_prefill(prefill, prefill.machine.link_lost(link, self.now))
        return True

    def notice_at_decode(self, pick: Picker) -> bool:
        options = [
            (d, link) for d in self.decodes for link in d.links if "decode" in self._broken.get(link, ())
        ]
        if not options:
            return False
        decode, link = pick.of(options)
        self._broken[link].discard("decode")
        decode.links.pop(link, None)
        self._at_decode(decode, decode.machine.link_lost(link, self.now))
        return True

    def end_fence(self, pick: Picker) -> bool:
        """A link is closed for good: no byte moves through it from now on. Some of its receives are
        reported before that is, and the others never."""
        options = [(d, link) for d in self.decodes for link in d.fencing]
        if not options:
            return False
        decode, link = pick.of(options)
        for transfer in [t for t in self._transfers.values() if t.link == link and not t.receive_over]:
            if pick.below(2):
                self._end_receive(transfer, ok=False)
            else:
                transfer.receive_over = True
                self._untouch(transfer)
        decode.fencing.pop(link, None)
        self._at_decode(decode, decode.machine.link_fenced(link, self.now))
        return True

    def stall(self, pick: Picker) -> bool:
        """Decode has waited long enough for one of its handoffs."""
        options = [
            (d, name)
            for d in self.decodes
            for name, attempt in self._attempts.items()
            if self.decodes[attempt.decode] is d and d.machine.state_of(name) is not None
        ]
        if not options:
            return False
        decode, name = pick.of(options)
        self._at_decode(decode, decode.machine.stalled(name, "stalled", self.now))
        return True

    # --- time and death

    def tick(self, pick: Picker) -> bool:
        self.now += (0.05, 0.25, 1.1, 2.1)[pick.below(4)]
        for prefill in self.prefills:
            self._at_prefill(prefill, prefill.machine.tick(self.now))
        for decode in self.decodes:
            self._at_decode(decode, decode.machine.tick(self.now))
        for i, decode in enumerate(self.decodes):
            if decode.retiring:
                self._end_decode(i)
        self._prune()
        return True

    def _prune(self) -> None:
        """Forget transfers of which nothing can be heard any more."""
        for key, transfer in list(self._transfers.items()):
            prefill = self._prefill_of(transfer.link)
            known = prefill is not None and (
                not transfer.send_over if transfer.source else transfer.name in prefill.sequences
            )
            if transfer.receive_over and not known:
                del self._transfers[key]

    def crash_prefill(self, pick: Picker) -> bool:
        """The process dies. What it had read into its messages may still land."""
        i = pick.below(len(self.prefills))
        dead = self.prefills[i]
        self.prefills[i] = self._start_prefill()
        for link in dead.links:
            self._break(link, noticed_by="prefill")
        self._cut_frames(dead.incarnation, pick)
        self._worker_lost("prefill", i)
        return True

    def crash_decode(self, pick: Picker) -> bool:
        i = pick.below(len(self.decodes))
        self._cut_frames(self.decodes[i].incarnation, pick)
        self._end_decode(i)
        return True

    def _end_decode(self, i: int) -> None:
        dead = self.decodes[i]
        self.decodes[i] = self._start_decode()
        for link in (*dead.links, *dead.fencing):
            self._break(link, noticed_by="decode")
        for transfer in self._transfers.values():
            if transfer.link.decode == dead.incarnation:
                transfer.receive_over = True
        self._worker_lost("decode", i)

    def _worker_lost(self, side: str, i: int) -> None:
        """The router hears that a worker died, or that the stream to it broke."""
        for name, attempt in self._attempts.items():
            on_it = attempt.decode == i if side == "decode" else attempt.prefill == i and not attempt.passed
            if on_it and not attempt.over and not self._entries[name.request_id].finished:
                self._give_up(name)

    # --- the end

    def settle(self, seed: int) -> None:
        """No more faults: every request must come to its end, and every block back to its pool."""
        for worker in self._workers():
            for pages in worker.others:
                worker.memory.pool.free(pages)
            worker.others.clear()
        rng = random.Random(seed)
        for _ in range(SETTLE_TICKS):
            self._drain(rng)
            if not self._unsettled():
                return
            self.step("tick", SMALL_TICK)
        raise ViolationError("; ".join(self._unsettled()))

    def _drain(self, rng: random.Random) -> None:
        """Do all there is to do, in any order, until nothing happens any more."""
        for _ in range(10_000):
            todo = list(FORWARD)
            rng.shuffle(todo)
            if not sum(self.step(event, rng.getrandbits(40)) for event in todo):
                return
        raise ViolationError("the world does not come to rest")

    def _unsettled(self) -> list[str]:
        """What is left that should not be."""
        left = [
            f"{name} has neither been answered nor given up"
            for name, attempt in self._attempts.items()
            if not attempt.over and not self._entries[name.request_id].finished
        ]
        for worker in self._workers():
            who, pool = worker.incarnation, worker.memory.pool
            if worker.machine.open_handoffs:
                left.append(f"{who} has {worker.machine.open_handoffs} open handoffs")
            if pool.num_held:
                left.append(f"{who} holds {pool.num_held} of {pool.num_blocks} blocks")
        left += [f"{d.incarnation} still promises {d.room.reserved}" for d in self.decodes if d.room.reserved]
        left += [f"{d.incarnation} still fences {list(d.fencing)}" for d in self.decodes if d.fencing]
        return left + [f"{p.incarnation} has {list(p.sequences)}" for p in self.prefills if p.sequences]


def run_randomly(config: WorldConfig, seed: int, steps: int) -> World:
    """A world driven by nothing but chance for ``steps`` events, then settled. Raises ViolationError."""
    world = World(config)
    world.advance(seed, steps)
    world.settle(seed)
    return world
