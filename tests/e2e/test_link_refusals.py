"""Workers whose KV means different things are not paired. What routers can know beforehand keeps the pair
apart, and decode answers alone; of the rest the client hears which field differs, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.support.clients import RingClient
from tests.support.ring import Ring, running, running_routers, worker
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
    "kv_cache_dtype": ("--kv-cache-dtype", "fp8"),
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
    decode = worker(tmp, "decode", "decode", str(ours), *DUMMY, "--connector", "tcp")
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


APART = ("model", "revision", "kv_dtype", "kv_cache_dtype", "quantization")
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
async def test_the_client_hears_which_field_differs_and_how(rings: Mapping[str, Ring], field: str) -> None:
    expected = {
        "block_size": "block_size of one side must divide that of the other: prefill 24, decode 16",
        "connectors": "no common connector: prefill has gloo, decode tcp",
    }
    async with RingClient(rings[field].url, "tiny") as client:
        with pytest.raises(httpx.HTTPStatusError) as failure:
            await client.complete([1, 2, 3], max_tokens=4)
    assert failure.value.response.status_code == 503
    assert f"decode refused the link: {expected[field]}" in failure.value.response.json()["error"]["message"]
    rings[field].wait_idle()
