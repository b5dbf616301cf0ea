"""Every family through rings of worker processes: transformers' tokens, over either connector, from blocks of
one size to those of another, and from and to workers of several ranks.

The families that differ most, each in one ring that has both; with ``BATON_FAMILIES=full`` every model in
rings that have one or the other.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.models.config import ModelConfig
from baton.parallel.shard import check_split
from tests.support.clients import RingClient
from tests.support.deep import all_deep_but
from tests.support.family_cases import FULL, LONGEST, MOST_DIFFERENT, NEW_TOKENS, Question, questions
from tests.support.family_models import FAMILY_MODELS
from tests.support.ring import Ring, running_ring

pytestmark = pytest.mark.beside

LENGTHS = (LONGEST, 64, 1)
"""Several chunks and messages, and a part of a block; whole blocks of either size; within a block."""
CHUNK = 128
TOKENS = 4096
"""In each pool."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A ring of a prefill and a decode worker or, without a connector, one worker that does both."""

    connector: str | None = "tcp"
    block_sizes: tuple[int, int] = (16, 16)
    """The block sizes of prefill and of decode."""
    tp: tuple[int, int] = (1, 1)
    pp: tuple[int, int] = (1, 1)

    def options(self, side: int) -> tuple[str, ...]:
        """The options of a worker: 0 for prefill, 1 for decode."""
        size = self.block_sizes[side]
        pool = ("--block-size", str(size), "--num-blocks", str(TOKENS // size))
        ranks = ("--tensor-parallel-size", str(self.tp[side]), "--pipeline-parallel-size", str(self.pp[side]))
        return (*pool, *ranks, "--prefill-chunk", str(CHUNK))


BOTH: Mapping[str, Kind] = {
    "tcp-16-to-64-tp1-to-tp2": Kind(connector="tcp", block_sizes=(16, 64), tp=(1, 2)),
    "ucx-64-to-16-tp2-to-tp1": Kind(connector="ucx", block_sizes=(64, 16), tp=(2, 1)),
    "tcp-64-to-16-pp2-to-pp1": Kind(connector="tcp", block_sizes=(64, 16), pp=(2, 1)),
    "ucx-16-to-64-tp1-to-tp2": Kind(connector="ucx", block_sizes=(16, 64), tp=(1, 2)),
    "tcp-64-to-16-tp2-to-tp1": Kind(connector="tcp", block_sizes=(64, 16), tp=(2, 1)),
    "ucx-16-to-64-pp1-to-pp2": Kind(connector="ucx", block_sizes=(16, 64), pp=(1, 2)),
}
"""Other blocks and other ranks at once: the start of a rank is what takes the time."""
KINDS: Mapping[str, Kind] = {
    **BOTH,
    "tcp-16-to-64": Kind(connector="tcp", block_sizes=(16, 64)),
    "tcp-64-to-16": Kind(connector="tcp", block_sizes=(64, 16)),
    "ucx-16-to-64": Kind(connector="ucx", block_sizes=(16, 64)),
    "ucx-64-to-16": Kind(connector="ucx", block_sizes=(64, 16)),
    "tp2": Kind(connector=None, tp=(2, 2)),
    "pp2": Kind(connector=None, pp=(2, 2)),
    "tp1-to-tp2": Kind(tp=(1, 2)),
    "tp2-to-tp1": Kind(tp=(2, 1)),
}
if FULL:
    CASES = [(name, kind) for name in FAMILY_MODELS for kind in KINDS if kind not in BOTH]
else:
    CASES = list(zip(MOST_DIFFERENT, BOTH, strict=True))

without_ucxx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None,
    reason="NOT TESTED: ucxx is not installed (pip install 'baton[ucx]')",
)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, tuple[Path, list[Question]]]]:
    """Name -> the model's directory, and what it is asked; made when it is first looked up."""
    root = tmp_path_factory.mktemp("models")

    class Asked(dict[str, tuple[Path, list[Question]]]):
        def __missing__(self, name: str) -> tuple[Path, list[Question]]:
            path = FAMILY_MODELS[name](root / name)
            self[name] = path, questions(path, LENGTHS)
            return self[name]

    yield Asked()


async def ask(ring: Ring, model: str, prompts: Sequence[list[int]]) -> list[list[list[int]]]:
    """All of them at once."""
    async with RingClient(ring.url, model) as client:
        answers = [client.complete(prompt, max_tokens=NEW_TOKENS, temperature=0) for prompt in prompts]
        return [[answer.token_ids] for answer in await asyncio.gather(*answers)]


def handoffs(ring: Ring, how: str) -> list[float]:
    """The counts of each decode worker. A counter of labels that did not occur has no sample."""
    name = f"baton_handoffs_{how}_total{{"
    return [
        sum(count for sample, count in worker.metrics().items() if sample.startswith(name))
        for worker in ring.of_role("decode")
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    all_deep_but(
        2,
        [
            pytest.param(name, kind, marks=without_ucxx if KINDS[kind].connector == "ucx" else ())
            for name, kind in CASES
        ],
    ),
)
async def test_tokens_are_those_of_transformers(
    asked: Mapping[str, tuple[Path, list[Question]]], name: str, kind: str, tmp_path: Path
) -> None:
    path, known = asked[name]
    made = KINDS[kind]
    try:
        check_split(ModelConfig.from_dir(path), max(made.tp), max(made.pp))
    except ValueError as refused:
        pytest.skip(str(refused))
    pairs = int(made.connector is not None)
    with running_ring(
        tmp_path,
        model=str(path),
        prefill=pairs,
        decode=pairs,
        both=1 - pairs,
        options=("--connector", made.connector, "--verify-handoff") if made.connector else made.options(0),
        prefill_options=made.options(0),
        decode_options=made.options(1),
    ) as ring:
        for caches in ("cold", "warm"):
            answers = await ask(ring, name, [question.prompt for question in known])
            assert answers == [question.answers for question in known], f"with {caches} caches"
        assert handoffs(ring, "completed") == pairs * [2 * len(known)]
        assert handoffs(ring, "aborted") == pairs * [0]
        ring.wait_idle()
