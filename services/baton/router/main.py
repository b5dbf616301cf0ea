"""The router program: HTTP and gRPC in front, a ring of workers behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket

import grpc
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from baton import hub, logs, options
from baton.errors import ModelError
from baton.options import StartError
from baton.ready import RouterReady, announce
from baton.router.config import RouterConfig
from baton.router.ring import WorkerRing
from baton.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

STOP_GRACE_S = 1.0


def run(config: RouterConfig) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status.

    Raises StartError, with one line for a person, when the tokenizer or a port cannot be had.
    """
    logs.configure(config.log_level)
    try:
        tokenizer = Tokenizer.from_dir(hub.resolve_model(config.model, weights=False))
    except ModelError as error:
        raise StartError(str(error)) from error
    return uvloop.run(_serve(config, tokenizer))
