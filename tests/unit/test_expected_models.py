"""A router uses workers of its own model only: the digest of a tokenizer, and what is refused by it."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizers

from baton import hub
from baton.greeting.cluster_key import ClusterKeys
from baton.router.dispatch.ring import WorkerRing
from baton.router.fleet import worker_client as workers
from baton.router.fleet.expected import ExpectedModel, WorkerRefusedError, check_worker
from baton.text.digest import NO_TOKENIZER, tokenizer_digest
from baton.text.errors import TokenizerError
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc
from tests.support.greetings import say_hello
from tests.support.local_worker import until

DEMO = hub.resolve_model("demo")

Json = dict[str, Any]


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[Callable[[Json], object]], str]:
    """The digest of the demo model's tokenizer after a change."""

    def make(change: Callable[[Json], object]) -> str:
        content = json.loads((DEMO / "tokenizer.json").read_text())
        change(content)
        (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=1))
        return tokenizer_digest(tmp_path)

    return make


def reorder(content: Json) -> None:
    content["model"]["vocab"] = dict(sorted(content["model"]["vocab"].items(), reverse=True))
    content["added_tokens"].reverse()


def respell_merges(content: Json) -> None:
    merges = content["model"]["merges"]
    content["model"]["merges"] = [
        " ".join(merge) if isinstance(merge, list) else merge.split(" ") for merge in merges
    ]


def swap_ids(content: Json) -> None:
    vocab = content["model"]["vocab"]
    one, other = list(vocab)[-2:]
    vocab[one], vocab[other] = vocab[other], vocab[one]


SAME: dict[str, Callable[[Json], object]] = {
    "order": reorder,
    "merges": respell_merges,
    "padding": lambda c: c.update(padding={"strategy": "BatchLongest"}, truncation=None),
    "special": lambda c: [token.update(special=not token["special"]) for token in c["added_tokens"]],
    "template": lambda c: c.update(decoder=None),
}
OTHER: dict[str, Callable[[Json], object]] = {
    "ids": swap_ids,
    "one token more": lambda c: c["added_tokens"].append({"id": 9999, "content": "<new>", "special": True}),
    "one token less": lambda c: c["model"]["vocab"].popitem(),
    "added token renamed": lambda c: c["added_tokens"][0].update(content="<other>"),
    "merges in another order": lambda c: c["model"]["merges"].reverse(),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_says_the_same_has_one_digest(
    changed: Callable[[Callable[[Json], object]], str], change: Callable[[Json], object]
) -> None:
    assert changed(change) == tokenizer_digest(DEMO)


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_what_means_something_else_has_another(
    changed: Callable[[Callable[[Json], object]], str], change: Callable[[Json], object]
) -> None:
    assert changed(change) != tokenizer_digest(DEMO)


def test_a_file_that_the_library_wrote_again_has_the_same(tmp_path: Path) -> None:
    tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json")).save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_digest(tmp_path) == tokenizer_digest(DEMO)


def test_scores_are_part_of_it(tmp_path: Path) -> None:
    digests = set()
    for vocab in ([["<unk>", 0.0], ["a", -1.5]], [["<unk>", 0.0], ["a", -1.25]], [["a", -1.5], ["<unk>", 0]]):
        content = {"model": {"type": "Unigram", "unk_id": 0, "vocab": vocab}, "added_tokens": []}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        digests.add(tokenizer_digest(tmp_path))
    assert len(digests) == 3


def test_a_directory_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    assert tokenizer_digest(tmp_path) == NO_TOKENIZER


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"vocab": 3}}', "[" * 100_000, "\xff"])
def test_a_file_that_is_none_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read as a tokenizer") as error:
        tokenizer_digest(tmp_path)
    assert "\n" not in str(error.value)


# --- who is refused

OURS = ExpectedModel(frozenset({"demo", "alias"}), "0123456789abcdef", 500)


def hello(**other: object) -> pb.WorkerHello:
    fields = {"incarnation": "i", "role": pb.ROLE_BOTH, "model": "demo", "tokenizer": OURS.tokenizer}
    return pb.WorkerHello(**{**fields, "max_model_len": 256, "vocab_size": 512, **other})  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [{}, {"model": "alias"}, {"revision": "new"}, {"tokenizer": NO_TOKENIZER}])
def test_workers_of_the_model_are_taken(other: dict[str, object]) -> None:
    check_worker(hello(**other), OURS)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"model": "llama-70b"}, "model: it serves 'llama-70b', and not alias or demo"),
        ({"model": ""}, "model: it serves ''"),
        ({"model": "x" * 1000 + "\n"}, "model: it serves '" + "x" * 64 + "…'"),
        ({"tokenizer": "f" * 16}, "tokenizer: its token ids have other meanings"),
        ({"tokenizer": ""}, "tokenizer: it does not tell which one"),
        ({"tokenizer": NO_TOKENIZER, "vocab_size": 499}, "vocab_size: it has 499 tokens, of 500"),
        ({"role": 99}, "role: it has 99"),
    ],
)
def test_others_are_refused_by_the_field(other: dict[str, object], why: str) -> None:
    with pytest.raises(WorkerRefusedError) as refusal:
        check_worker(hello(**other), OURS)
    assert str(refusal.value).startswith(why)


KEY = b"the cluster key of tests"


class Greeting(pb_grpc.WorkerServicer):
    """A worker that says hello and nothing more."""

    def __init__(self, says: pb.WorkerHello) -> None:
        self.says = says
        self.calls = 0

    async def Connect(  # noqa: N802 (the name is the contract's)
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: object
    ) -> AsyncIterator[pb.WorkerMessage]:
        self.calls += 1
        async for said in say_hello(request_iterator, KEY, self.says):
            yield said
        async for _ in request_iterator:
            yield pb.WorkerMessage(frame=pb.Frame())

    async def SwitchRole(  # noqa: N802
        self, request: pb.SwitchRoleRequest, context: object
    ) -> pb.SwitchRoleReply:
        raise NotImplementedError


@asynccontextmanager
async def ring_before(worker: Greeting) -> AsyncIterator[WorkerRing]:
    server = grpc.aio.server()
    pb_grpc.add_WorkerServicer_to_server(worker, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    ring = WorkerRing([address], "demo", ClusterKeys(KEY), expected=OURS)
    ring.start()
    try:
        yield ring
    finally:
        await ring.close()
        await server.stop(None)


async def test_one_that_is_refused_is_not_ready_is_told_of_once_and_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "REFUSED_RETRY_S", 0.05)
    worker = Greeting(hello(model="llama-70b"))
    async with ring_before(worker) as ring:
        await until(lambda: worker.calls >= 4)
        assert not ring.ready and ring.model is None
        [view] = ring.fleet.loads()
        assert (view.ready, view.refused) == (False, True)
        refusals = [line for line in caplog.messages if "is refused" in line]
        assert len(refusals) == 1 and "llama-70b" in refusals[0]
        assert not [line for line in caplog.messages if "has ended" in line]
        worker.says = hello(model="llama-70b", incarnation="another")
        calls = worker.calls
        await until(lambda: worker.calls >= calls + 3)
        assert sum("is refused" in line for line in caplog.messages) == 2
        worker.says = hello()
        await until(lambda: ring.ready)
        [view] = ring.fleet.loads()
        assert (view.ready, view.refused) == (True, False)


async def test_one_that_is_away_is_not_refused_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "REFUSED_RETRY_S", 0.05)
    server = grpc.aio.server()
    pb_grpc.add_WorkerServicer_to_server(Greeting(hello(tokenizer="f" * 16)), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    ring = WorkerRing([address], "demo", ClusterKeys(KEY), expected=OURS)
    ring.start()
    [client] = ring.fleet.workers
    await until(lambda: client.refused)
    await server.stop(None)
    await until(lambda: not client.refused)
    await ring.close()


def test_the_demo_model_has_the_same_digest_wherever_it_is(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "elsewhere")
    assert tokenizer_digest(tmp_path / "elsewhere") == tokenizer_digest(DEMO)
