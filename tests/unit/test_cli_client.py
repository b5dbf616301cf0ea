"""Reading an answer off the wire, whole and broken."""

from __future__ import annotations

import http.server
import io
import logging
import threading
from collections.abc import Iterator

import pytest

from baton.cli.client import AnswerPiece, Question, ask, is_ready, read_events
from baton.process import ready
from baton.process.logs import LogReader
from baton.process.options import UserError
from tests.support.fake_service import Router


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Router)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_answer_is_streamed(url: str) -> None:
    assert is_ready(url)
    pieces = list(ask(url, Question(prompt="What?")))
    assert pieces == [AnswerPiece("The "), AnswerPiece("answer."), AnswerPiece("", 2)]


def events(*lines: str) -> io.BytesIO:
    return io.BytesIO("".join(f"data: {line}\n\n" for line in lines).encode())


def test_completions_and_chat_read_alike() -> None:
    stream = events(
        '{"choices": [{"text": "a"}]}', '{"choices": [{"delta": {"role": "assistant"}}]}', "[DONE]"
    )
    assert [piece.text for piece in read_events(stream)] == ["a", ""]


def test_an_error_in_the_stream_is_told() -> None:
    stream = events('{"choices": [{"text": "a"}]}', '{"error": {"message": "decode was lost"}}')
    with pytest.raises(UserError, match="decode was lost"):
        list(read_events(stream))


def test_a_stream_that_is_cut_off_is_no_answer() -> None:
    with pytest.raises(UserError, match="cut off"):
        list(read_events(events('{"choices": [{"text": "a"}]}')))


@pytest.mark.parametrize("address", ["here", "ftp://host", "http://"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(UserError, match="is not an address of a ring"):
        list(ask(address, Question(prompt="What?")))


@pytest.mark.parametrize(
    "message",
    [
        ready.WorkerReady("127.0.0.1:1", "both", "127.0.0.1:2"),
        ready.RouterReady("127.0.0.1:1"),
        ready.Progress("load", 3, 9),
        ready.ChosenSizes("cpu: blocks of 16 tokens"),
    ],
)
def test_ready_lines_survive_the_round_trip(message: ready.Message) -> None:
    stream = io.StringIO()
    ready.announce(message, stream)
    assert stream.getvalue().count("\n") == 1
    assert ready.parse(stream.getvalue().rstrip()) == message


@pytest.mark.parametrize("line", ["", "hello", "BATON_READY", "BATON_READY {", 'BATON_READY {"x": 1}'])
def test_other_lines_are_none(line: str) -> None:
    assert ready.parse(line) is None


def test_log_lines_keep_their_level_through_a_traceback() -> None:
    reader = LogReader()
    assert reader.read("Segmentation fault") == logging.ERROR
    assert reader.read("2026-01-01 10:00:00,123 INFO baton.worker: loading") == logging.INFO
    assert reader.last_error == "Segmentation fault"
    assert reader.read("2026-01-01 10:00:01,123 ERROR baton.worker: failed") == logging.ERROR
    assert reader.read("Traceback (most recent call last):") == logging.ERROR
    assert reader.read("ValueError: no") == logging.ERROR
    assert reader.last_error == "ValueError: no"
    assert reader.read("2026-01-01 10:00:01,123 INFO baton.worker: done") == logging.INFO
    assert reader.read("error: models/x has no config.json") == logging.ERROR
    assert reader.last_error == "models/x has no config.json"
