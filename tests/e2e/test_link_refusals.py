"""Workers whose KV means different things are not paired. What routers can know beforehand keeps the pair
apart; of the rest they hear by the first refused link. Either way decode answers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.support.clients import RingClient
from tests.support.ring import Ring, running, running_routers, scrape, worker
from tests.support.tiny_models import save_shape

pytestmark = pytest.mark.beside

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}
DUMMY = ("--load-format", "dummy", "--num-blocks", "32")
PREFILLS: Mapping[str, tuple[str, ...]] = {
    "model": ("--served-model-name", "another"),
    "revision": (),
    "kv_dtype": ("--dtype", "bfloat16"),
    "verify": ("--kv-cache-dtype", "fp8", "--verify-handoff"),
    "quantization": ("--quantization", "int8"),
    "block_size": ("--block-size", "24"),
    "connectors": ("--connector", "gloo"),
}
"""Field → what is different about a prefill worker."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two directories of one name with different content."""
    tmp = tmp_path_factory.mktemp("models")
    ours = save_shape(tmp / "ours" / "tiny", **SHAPE)
    return ours, save_shape(tmp / "theirs" / "tiny", **SHAPE, rope_theta=5e5)


@pytest.fixture(scope="module")
def rings(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Ring]]:
    """A ring for each field, all of them with one decode worker."""
    ours, theirs = models
    tmp = tmp_path_factory.mktemp("rings")
    options = ("--connector", "tcp", "--kv-convert", "allow")
    decode = worker(tmp, "decode", "decode", str(ours), *DUMMY, *options)
    prefills = {
        field: worker(tmp, field, "prefill", str(theirs if field == "revision" else ours), *DUMMY, *options)
        for field, options in PREFILLS.items()
    }
    with running([decode, *prefills.values()]):
        groups = {field: [prefill, decode] for field, prefill in prefills.items()}
        named = {f"to {field}": group for field, group in groups.items()}
        # A router uses no workers of a model whose names it does not have.
        names = ("--served-model-name", "tiny", "--served-model-name", "another")
        with running_routers(tmp, str(ours), named, ("--queue-timeout", "2", *names)) as running_rings:
            yield {field: running_rings[f"to {field}"] for field in PREFILLS}


APART = ("model", "revision", "kv_dtype", "verify", "quantization")
"""Told in a worker's greeting: such workers are of different groups."""


@pytest.mark.parametrize("field", APART)
async def test_workers_of_different_groups_are_never_paired(rings: Mapping[str, Ring], field: str) -> None:
    ring = rings[field]
    prefill, decode = ring.workers
    before = prefill.metrics(), decode.metrics()
    async with RingClient(ring.url, "tiny") as client:
        assert len((await client.complete([1, 2, 3], max_tokens=4)).token_ids) == 4
    assert prefill.ready.address in ring.router.log.read_text()
    assert "fits no decode worker" in ring.router.log.read_text()
    count = "baton_handoffs_completed_total"
    for service, earlier in zip((prefill, decode), before, strict=True):
        assert {k: v for k, v in service.metrics().items() if k.startswith(count)} == {
            k: v for k, v in earlier.items() if k.startswith(count)
        }
    ring.wait_idle()


@pytest.mark.parametrize("field", [field for field in PREFILLS if field not in APART])
async def test_a_pair_that_decode_refuses_is_tried_once_and_decode_answers_alone(
    rings: Mapping[str, Ring], field: str
) -> None:
    expected = {
        "block_size": "block_size of one side must divide that of the other: prefill 24, decode 16",
        "connectors": "no common connector: prefill has gloo, decode tcp",
    }
    ring = rings[field]
    async with RingClient(ring.url, "tiny") as client:
        for _ in range(3):
            assert len((await client.complete([1, 2, 3], max_tokens=4)).token_ids) == 4
    assert f"decode refused the link: {expected[field]}" in ring.router.log.read_text()
    async with httpx.AsyncClient(base_url=ring.url) as http:
        health = (await http.get("/health?model=tiny")).json()
    assert health == {"status": "ok", "unlinked_pairs": {field: 1}}
    metrics = scrape(f"{ring.url}/metrics")
    assert metrics[f'baton_unlinked_pairs{{field="{field}",model="tiny"}}'] == 1
    assert metrics['baton_resumes_total{cause="refused"}'] == 1
    ring.wait_idle()
