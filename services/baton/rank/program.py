"""A rank's life: load, meet the others, and compute step after step, as the leader says.

Two threads. One reads what the leader sends and makes the host tier's copies at once, beside a step that
runs, as the leader does with its own. The other one loads and computes. When the leader is gone the process
ends, whatever they are doing (``__main__``).
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from contextlib import suppress
from typing import NoReturn

import torch
from torch import Tensor

from baton import logs
from baton.connector.ranks import server
from baton.connector.ranks.share import Share
from baton.engine.break_even import BreakEven
from baton.engine.host_memory import HostMemory, plan_from_bytes
from baton.engine.rank_start import LoadedRank, checked_blocks, load_rank, spare_device_memory
from baton.engine.step import StepTensors, prompt_pieces
from baton.parallel.channel import Channel, ChannelClosedError, to_leader
from baton.parallel.messages import (
    Connect,
    CopyBlocks,
    Failed,
    NewPool,
    Reply,
    Scratch,
    ServeLinks,
    Spare,
    Start,
    StepLayout,
    Stop,
    ToLeader,
    ToRank,
    Work,
)
from baton.telemetry.startup import StartClock
from baton_kernels.blocks import copy_blocks

log = logging.getLogger(__name__)

EXIT_FAILED = 70


def run(sock: socket.socket, links: socket.socket) -> NoReturn:
    """Serves the leader at the other end of ``sock``, and its connectors at that of ``links``; ends the
    process."""
    channel = to_leader(sock)
    rank = Rank(channel, links)
    threading.Thread(target=rank.read, name="leader", daemon=True).start()
    try:
        rank.work()
    except BaseException as error:
        log.debug("a rank failed", exc_info=True)
        lines = str(error).strip().splitlines()
        with suppress(OSError):  # the leader is gone
            channel.send(Failed(lines[0] if lines else type(error).__name__))
    _end(EXIT_FAILED)


class Rank:
    """What the leader's messages work on."""

    def __init__(self, channel: Channel[ToLeader, ToRank], links: socket.socket) -> None:
        self._channel = channel
        self._links = links
        self._work: queue.SimpleQueue[tuple[Work, bytearray]] = queue.SimpleQueue()
        self._host: HostMemory | None = None
        self._scratch_bytes = 0
        self.loaded: LoadedRank | None = None
        self.pool: Tensor | None = None
        """[num_blocks, its kv_heads, its layers, 2, block_size, head_dim]"""

    # -- the leader's thread -----------------------------------------------------------------------------

    def read(self) -> None:
        """Takes what the leader sends, until it is gone. Ends the process then."""
        try:
            while True:
                message, payload = self._channel.receive()
                if isinstance(message, Stop):
                    break
                if isinstance(message, CopyBlocks):
                    assert self._host is not None
                    self._host.copy(plan_from_bytes(message.num_saves, payload))
                    self._channel.send(Reply(message.reply))
                else:
                    self._work.put((message, payload))
        except (ChannelClosedError, OSError):
            pass
        except BaseException:
            log.exception("the host tier failed")
            _end(EXIT_FAILED)
        _end(0)

    # -- the thread that computes ------------------------------------------------------------------------

    def work(self) -> NoReturn:
        """Does what comes, in order."""
        while True:
            message, payload = self._work.get()
            reply = self._answer(message, payload)
            if message.reply:
                self._channel.send(Reply(message.reply, reply))

    def _answer(self, message: Work, payload: bytearray) -> int:
        if isinstance(message, StepLayout):
            self._step(message, payload)
            return 0
        if isinstance(message, Start):
            return self._load(message)
        assert self.loaded is not None
        match message:
            case Connect(host=host, port=port):
                self.loaded.connect(host, port)
            case NewPool(num_blocks=num_blocks, num_host_blocks=num_host_blocks):
                self._take_pool(num_blocks, num_host_blocks)
            case Scratch(num_blocks=num_blocks):
                self.pool = self.loaded.new_pool(num_blocks)
                self._scratch_bytes = self.pool.nbytes
                torch.cuda.reset_peak_memory_stats(self.loaded.device)
            case Spare(device_memory_fraction=fraction):
                self.pool = None
                spare = spare_device_memory(self.loaded.device, self._scratch_bytes, fraction)
                return checked_blocks(spare, self.loaded.block_bytes)
            case ServeLinks():
                self._serve_links()
            case _:
                raise AssertionError(message)
        return 0

    def _load(self, part: Start) -> int:
        logs.configure(logging.getLevelName(part.log_level))
        if part.num_threads is not None:
            torch.set_num_threads(part.num_threads)
        clock = StartClock()
        self.loaded = load_rank(part, clock)
        log.info("rank %d loaded after %s", part.rank, clock.times())
        return self.loaded.block_bytes

    def _take_pool(self, num_blocks: int, num_host_blocks: int) -> None:
        """The pool that is served from."""
        assert self.loaded is not None
        self.pool = self.loaded.new_pool(num_blocks)
        if num_host_blocks:
            self._host = HostMemory(self.pool, num_host_blocks, BreakEven(self.loaded.block_size))

    def _serve_links(self) -> None:
        """Lets the connectors of this rank, which get a thread of their own, have the pool."""
        assert self.loaded is not None and self.pool is not None
        shard = self.loaded.model.shard
        server.start(self._links, self.pool, Share(shard.kv_heads, shard.layers), lambda: _end(EXIT_FAILED))

    @torch.inference_mode()
    def _step(self, layout: StepLayout, payload: bytearray) -> None:
        """The leader's ``ModelRunner``, without what is done with the logits."""
        assert self.loaded is not None and self.pool is not None
        model, device = self.loaded.model, self.loaded.device
        step = StepTensors.of(layout, torch.frombuffer(payload, dtype=torch.int64).to(device))
        if step.copies is not None:
            sources, targets = step.copies
            copy_blocks(self.pool, targets, self.pool, sources)
        hidden = model.forward(step.token_ids, step.batch, self.pool)
        for start, count in layout.prompts:
            for piece in prompt_pieces(hidden[start : start + count]):
                model.logits(piece)
        if layout.num_rows:
            model.logits(hidden if step.rows is None else hidden[step.rows])
        elif device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _end(status: int) -> NoReturn:
    """At once: threads of torch may be waiting for ranks that are gone."""
    logging.shutdown()
    os._exit(status)
