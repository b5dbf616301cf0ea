"""A node that does not lead, from its first call to its end: ``baton node``.

The node has no model and no torch of its own; it starts the processes that have. One thread reads from the
leader, and one writes: messages go through its queue, with heartbeats in between.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from types import FrameType

from baton import __version__, hub
from baton.net import sockets
from baton.nodes import handshake
from baton.nodes.config import NodeConfig
from baton.nodes.handshake import HANDSHAKE_S, HandshakeError, WrongKeyError
from baton.nodes.health import Health
from baton.nodes.messages import (
    BEAT_S,
    SILENCE_S,
    Attach,
    End,
    Found,
    Join,
    Leaving,
    NodeBeat,
    NotFound,
    RankEnded,
    Refused,
    Serving,
    Started,
    StartRanks,
    ToLeader,
    ToNode,
    Welcome,
    prepare,
    to_leader,
)
from baton.parallel.channel import Channel, ChannelClosedError
from baton.parallel.processes import END_S, end_process_within, how_it_ended, start_process
from baton.process import descriptors, logs
from baton.process.options import ModelError, StartError, join_address

log = logging.getLogger(__name__)

EXIT_CUT_SHORT = 1
EXIT_CRASHED = 70
"""The exit status of a node whose worker crashed, equal to that of a worker whose rank died."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0


def run(config: NodeConfig) -> int:
    """Join, and serve until the leader ends; return the exit status. Once the worker is ready, SIGTERM and
    SIGINT are passed on to the leader, which drains; a second signal ends this node at once, and with it the
    worker. Before that the first signal does so, by its default action: there is nothing to drain, and a
    leader that loads does not listen.

    Raises StartError, with one line for a person, when the leader is not there in time, or refuses.
    """
    logs.configure(config.log_level)
    descriptors.raise_limit()
    with Health.serving(config.host, config.health_port) as health:
        return Node(config, health).run()


class Node:
    """One node's part of one worker."""

    def __init__(self, config: NodeConfig, health: Health, silence_s: float = SILENCE_S) -> None:
        self._config = config
        self._health = health
        self._silence_s = silence_s
        self._leader = join_address(config.leader_address, config.node_port)
        self._to_say: queue.SimpleQueue[ToLeader] = queue.SimpleQueue()
        self._told_to_end = False
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        """Join and serve, as the module's ``run`` does. Call it on the main thread."""
        log.info("joining the leader at %s as node %d", self._leader, self._config.node_index)
        until = time.monotonic() + self._config.join_timeout
        pause = _FIRST_PAUSE_S
        while True:
            try:
                channel, welcome = self._join()
            except WrongKeyError as error:
                raise StartError(f"the leader at {self._leader} is not ours: {error}") from error
            except (OSError, _TryAgainError) as error:
                if time.monotonic() > until:
                    waited = f"{self._config.join_timeout:g} s (--join-timeout)"
                    raise StartError(f"did not join {self._leader} within {waited}: {error}") from error
                log.debug("did not join %s yet: %s", self._leader, error)
                time.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE_S)
            else:
                return self._serve(channel, welcome)

    def _leave_at_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._told_to_end:
            self._kill()
            os._exit(EXIT_CUT_SHORT)
        self._told_to_end = True
        self._to_say.put(Leaving())

    # --- joining

    def _dial(self) -> socket.socket:
        """Return a connection to the leader on which both sides have proved the key."""
        config = self._config
        sock = sockets.dial(config.leader_address, config.node_port, HANDSHAKE_S)
        try:
            prepare(sock)
            handshake.join(sock, config.cluster_keys)
        except BaseException:
            sock.close()
            raise
        return sock

    def _join(self) -> tuple[Channel[ToLeader, ToNode], Welcome]:
        config = self._config
        channel = to_leader(self._dial())
        try:
            channel.send(
                Join(__version__, config.node_index, config.nodes, config.host, config.advertised_host)
            )
            answer, _ = channel.receive()
            if isinstance(answer, Welcome):
                return channel, answer
        except OSError:
            channel.close()
            raise
        channel.close()
        if not isinstance(answer, Refused):
            raise HandshakeError(f"it answers with {answer}")
        if answer.try_again:
            raise _TryAgainError(answer.why)
        raise StartError(f"the leader at {self._leader} refuses this node: {answer.why}")

    # --- messages of the leader

    def _serve(self, channel: Channel[ToLeader, ToNode], welcome: Welcome) -> int:
        logs.configure(welcome.log_level)
        log.info("joined the leader at %s", self._leader)
        channel.sock.settimeout(self._silence_s)
        threading.Thread(target=self._speak, args=(channel,), name="speak", daemon=True).start()
        threading.Thread(target=self._find, args=(welcome.model,), name="find", daemon=True).start()
        try:
            while True:
                message, _ = channel.receive()
                if isinstance(message, End):
                    return self._end(message.why)
                self._take(message)
        except ChannelClosedError as error:
            log.error("the leader at %s is gone, and this node with it: %s", self._leader, error)
            return EXIT_CRASHED
        finally:
            self._kill()

    def _take(self, message: ToNode) -> None:
        match message:
            case StartRanks():
                self._start(message)
            case Serving():
                log.info("the worker is ready")
                self._leave_at_signals()
                self._health.ready = True
            case Refused(why=why):
                raise StartError(f"the leader at {self._leader} refuses this node: {why}")
            case NodeBeat():
                pass
            case _:
                raise ChannelClosedError(f"not to be said now: {message}")

    def _end(self, why: str) -> int:
        """Wait for the ranks, which the leader has told to stop, if it ends in order; return the exit
        status."""
        if why:
            log.error("the worker has ended: %s", why)
            return EXIT_CRASHED
        until = time.monotonic() + END_S
        for process in self._processes:
            end_process_within(process, until - time.monotonic())
        log.info("the worker has ended")
        return 0

    def _kill(self) -> None:
        """Kill the ranks. No rank of this node is left at the return: another worker may take its place."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    # --- work for the leader

    def _find(self, model: str) -> None:
        try:
            path = hub.resolve_model(model).resolve()
            self._to_say.put(Found(str(path), hub.revision_of(path)))
        except (ModelError, OSError) as error:
            self._to_say.put(NotFound(str(error)))

    def _start(self, order: StartRanks) -> None:
        for rank in range(order.first, order.stop):
            control = self._attached(Attach(order.token, rank, "control"))
            links = self._attached(Attach(order.token, rank, "links"))
            process = start_process(control, links, order.num_threads)
            self._processes.append(process)
            self._to_say.put(Started(rank, process.pid))
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _attached(self, attach: Attach) -> socket.socket:
        try:
            sock = self._dial()
            to_leader(sock).send(attach)
        except OSError as error:
            raise ChannelClosedError(f"rank {attach.rank} has no connection: {error}") from error
        sock.settimeout(None)
        return sock

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._to_say.put(RankEnded(rank, how_it_ended(process.wait())))

    def _speak(self, channel: Channel[ToLeader, ToNode]) -> None:
        """Send messages and heartbeats until the leader is gone; the reading thread notices that."""
        while True:
            try:
                message: ToLeader = self._to_say.get(timeout=BEAT_S)
            except queue.Empty:
                message = NodeBeat()
            try:
                channel.send(message)
            except OSError:
                return


class _TryAgainError(Exception):
    """The leader has no place for this node, for now."""
