"""A rank's life: load, connect to the other ranks, and compute step after step, as the leader says.

Two threads. One reads the leader's messages and makes the host tier's copies at once, beside a step that
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

from baton.engine.device import enter_device
from baton.engine.graphs import GraphedModel, GraphSize, recorder_of
from baton.engine.kv.break_even import BreakEven
from baton.engine.kv.host_memory import HostMemory, plan_from_bytes
from baton.engine.memory import recordings_bytes
from baton.engine.model import Model
from baton.engine.rank_start import LoadedRank, checked_blocks, load_rank, spare_device_memory
from baton.engine.step import StepTensors, prompt_pieces
from baton.models.loader import kv_layout
from baton.parallel.channel import Channel, ChannelClosedError, to_leader
from baton.parallel.messages import (
    Connect,
    CopyBlocks,
    NewPool,
    RankFailed,
    Record,
    Reply,
    Scratch,
    ServeLinks,
    Spare,
    Start,
    StepLayout,
    StopRank,
    ToLeader,
    ToRank,
    TryRecordings,
    Work,
)
from baton.process import logs
from baton.process.start_clock import StartClock
from baton.transport.pool_memory import PoolMemory
from baton.transport.ranks import server
from baton.transport.ranks.shard import rank_shard
from baton_kernels.blocks import copy_blocks

log = logging.getLogger(__name__)

EXIT_FAILED = 70


def run(sock: socket.socket, links: socket.socket) -> NoReturn:
    """Serves the leader at the other end of ``sock``, and its connectors at the other end of ``links``; ends
    the process."""
    channel = to_leader(sock)
    rank = Rank(channel, links)
    threading.Thread(target=rank.read, name="leader", daemon=True).start()
    try:
        rank.work()
    except BaseException as error:
        log.debug("a rank failed", exc_info=True)
        lines = str(error).strip().splitlines()
        with suppress(OSError):  # the leader is gone
            channel.send(RankFailed(lines[0] if lines else type(error).__name__))
    _end(EXIT_FAILED)


class Rank:
    """A rank's state, which the leader's messages work on."""

    def __init__(self, channel: Channel[ToLeader, ToRank], links: socket.socket) -> None:
        self._channel = channel
        self._links = links
        self._work: queue.SimpleQueue[tuple[Work, bytearray]] = queue.SimpleQueue()
        self._host: HostMemory | None = None
        self._peak: int | None = None
        """The memory of the largest steps, in bytes, from before recordings were tried."""
        self._recordings_bytes = 0
        self._model: Model | None = None
        """The model, whose decode steps may be replayed."""
        self._whole: Tensor | None = None
        """The pool with the blocks behind it that belong to nobody."""
        self.loaded: LoadedRank | None = None
        self.pool: Tensor | None = None
        """[num_blocks, the rank's kv_heads, the rank's layers, 2, block_size, head_dim]"""

    # -- the leader's thread -----------------------------------------------------------------------------

    def read(self) -> None:
        """Takes the leader's messages until it is gone. Ends the process then."""
        try:
            while True:
                message, payload = self._channel.receive()
                if isinstance(message, StopRank):
                    break
                if isinstance(message, CopyBlocks):
                    assert self._host is not None and self.loaded is not None
                    enter_device(self.loaded.device)
                    self._host.copy(plan_from_bytes(message.num_saves, payload))
                    if message.reply:
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
        """Does the leader's work in order."""
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
            case NewPool(num_blocks=num_blocks, num_host_blocks=num_host_blocks, scratch=scratch):
                self._take_pool(num_blocks, num_host_blocks, scratch)
            case Scratch(num_blocks=num_blocks):
                self.pool = self.loaded.new_pool(num_blocks)
                torch.cuda.reset_peak_memory_stats(self.loaded.device)
            case TryRecordings(sizes=sizes, width=width):
                assert self.pool is not None
                self._peak = self._measured_peak()
                tried = [GraphSize(*size) for size in sizes]
                self._recordings_bytes = recordings_bytes(
                    self.loaded.model, self.pool, tried, width, self.loaded.layout
                )
            case Spare(device_memory_fraction=fraction, scratch=scratch):
                peak = self._measured_peak() if self._peak is None else self._peak
                self.pool = None
                spare = spare_device_memory(self.loaded.device, peak, fraction)
                return checked_blocks(spare - self._recordings_bytes, self.loaded.block_bytes, scratch)
            case Record(sizes=sizes, width=width):
                assert self._whole is not None
                recorder = recorder_of(self.loaded.device)
                recorded = [GraphSize(*size) for size in sizes]
                self._model = GraphedModel(
                    self.loaded.model, self._whole, recorded, width, recorder, self.loaded.layout
                )
            case ServeLinks():
                self._serve_links()
            case _:
                raise AssertionError(message)
        return 0

    def _measured_peak(self) -> int:
        """The peak since ``Scratch``, without the pool that was made for it."""
        assert self.loaded is not None and self.pool is not None
        return torch.cuda.max_memory_allocated(self.loaded.device) - self.pool.nbytes

    def _load(self, part: Start) -> int:
        logs.configure(logging.getLevelName(part.log_level))
        if part.num_threads is not None:
            torch.set_num_threads(part.num_threads)
        clock = StartClock()
        self.loaded = load_rank(part, clock)
        self._model = self.loaded.model
        log.info("rank %d loaded after %s", part.rank, clock.times())
        return self.loaded.block_bytes

    def _take_pool(self, num_blocks: int, num_host_blocks: int, scratch: int) -> None:
        """Allocates the pool to serve from, with ``scratch`` blocks behind it, and its host tier."""
        assert self.loaded is not None
        self._whole = self.loaded.new_pool(num_blocks + scratch)
        self.pool = self._whole[:num_blocks]
        if num_host_blocks:
            self._host = HostMemory(self.pool, num_host_blocks, BreakEven(self.loaded.block_size))

    def _serve_links(self) -> None:
        """Lets the connectors of this rank, which get a thread of their own, have the pool."""
        assert self.loaded is not None and self.pool is not None
        model, layout = self.loaded.model, self.loaded.layout
        whole = kv_layout(model.config, layout.block_size, self.loaded.kv_dtype, None, layout.scale_bytes)
        share = rank_shard(whole.groups, layout.groups, model.shard.tp_rank, model.shard.tp_size)
        scales = self.loaded.kv_scales
        if self._host is None:
            memory = PoolMemory(self.pool, layout=layout, kv_scales=scales)
        else:
            memory = PoolMemory(self.pool, self._host.settle, layout, scales)
        server.start(self._links, memory, share, lambda: _end(EXIT_FAILED))

    @torch.inference_mode()
    def _step(self, layout: StepLayout, payload: bytearray) -> None:
        """Computes the leader's step like its ``ModelRunner``, but leaves the logits to the leader."""
        assert self.loaded is not None and self._model is not None and self.pool is not None
        model, device = self._model, self.loaded.device
        if self._host is not None:
            self._host.join()
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
    """Ends the process at once: threads of torch may be waiting for ranks that are gone."""
    logging.shutdown()
    os._exit(status)
