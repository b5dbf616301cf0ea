"""Tile sizes that were tuned: kept, found again, and refused if they are nonsense."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("a device may have tile sizes of its own", allow_module_level=True)

from baton_kernels.cuda import tuned
from baton_kernels.cuda.tuned import Tiling, TuningError, read, tilings_of, write
from loadtest.expert_tuning import expert_candidates, expert_subjects
from loadtest.kernel_tuning import best, candidates, subjects
from tests.support.interpreted import attention, shapes
from tests.support.paged_steps import Case, lay_out

DEVICE = "NVIDIA H200"
GPU = shapes.Device(132, 90, DEVICE)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    tilings_of.cache_clear()
    yield tmp_path / "kernels" / "nvidia-h200.json"
    tilings_of.cache_clear()


def name_of(kernel: str, chosen: Tiling, group: int = 4) -> str:
    return shapes.Shape(64, 128, torch.bfloat16, 90).name(kernel, group, chosen)


def test_they_are_found_where_they_were_kept(cache: Path) -> None:
    pool, _ = lay_out(Case(8, 2, 128, 64, None, (5,), (), torch.bfloat16))
    plain = shapes.Shape.of(pool, shapes.Device(132, 90))
    decode, prefill = plain.decode(4), plain.prefill(4)
    ours = {
        name_of("decode", decode): Tiling(decode.rows, decode.tile, 2, 3),
        name_of("prefill", prefill): Tiling(64, 32, 4, 2),
    }
    write(cache, DEVICE, ours)
    assert read(cache, DEVICE) == ours
    shape = shapes.Shape.of(pool, GPU)
    assert shape.decode(4) == Tiling(decode.rows, decode.tile, 2, 3)
    assert shape.prefill(4) == Tiling(64, 32, 4, 2)
    # Other shapes keep the defaults.
    assert shape.decode(8) == plain.decode(8)
    assert shape.decode(4, 5) == plain.decode(4, 5)


@pytest.mark.deep
def test_the_kernels_use_them(cache: Path) -> None:
    case = Case(8, 2, 64, 16, None, (100, 30), ((20, 40),))
    pool, batch = lay_out(case)
    plain = shapes.Shape.of(pool, shapes.Device(132, 90))
    write(cache, DEVICE, {plain.name("prefill", 4, plain.prefill(4)): Tiling(16, 16, 1, 1)})
    q = torch.randn(batch.positions.numel(), 8, 64)
    nameless = attention.CudaPlan.build(batch, pool, {None}, 8, shapes.Device(132, 90))
    assert nameless.shape.prefill(4).rows == 64
    by_default = nameless.attend(pool, 0, q, scale=0.1, window=None, softcap=None)
    plan = attention.CudaPlan.build(batch, pool, {None}, 8, GPU)
    assert plan.shape.prefill(4).rows == 16
    tuned = plan.attend(pool, 0, q, scale=0.1, window=None, softcap=None)
    torch.testing.assert_close(tuned, by_default)


def test_a_device_without_any_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert tilings_of(DEVICE) == {}
    assert [record.getMessage() for record in caplog.records] == [
        "kernels: nothing was tuned on NVIDIA H200, so tile sizes are the defaults"
    ]


GOOD = {"rows": 64, "tile": 32, "warps": 4, "stages": 2}
SHAPE = "prefill of 128 rows, head_dim 128, group 4, blocks of 64, bfloat16, arch 90"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a file of tile sizes"),
        ("[]", "allowed is an object of device and tilings"),
        ({"device": DEVICE}, "allowed is an object of device and tilings"),
        ({"device": "NVIDIA L4", "tilings": {}}, "device is 'NVIDIA L4'; allowed: 'NVIDIA H200'"),
        ({"device": DEVICE, "tilings": 3}, "tilings is 3; allowed: an object"),
        ({"device": DEVICE, "tilings": {"fast": GOOD}}, "'fast' is no shape"),
        ({"device": DEVICE, "tilings": {SHAPE: {"rows": 64}}}, "allowed: an object of rows, tile, warps"),
        (
            {"device": DEVICE, "tilings": {SHAPE: {**GOOD, "tile": 33}}},
            "tile is 33; allowed: 16, 32, 64",
        ),
        ({"device": DEVICE, "tilings": {SHAPE: {**GOOD, "warps": "4"}}}, "warps is '4'; allowed: 1, 2"),
        ({"device": DEVICE, "tilings": {SHAPE: {**GOOD, "warps": True}}}, "warps is True"),
        ({"device": DEVICE, "tilings": {SHAPE: {**GOOD, "stages": 90}}}, "stages is 90"),
    ],
)
def test_nonsense_is_refused_and_named(cache: Path, content: object, says: str) -> None:
    cache.parent.mkdir()
    cache.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TuningError) as refused:
        tilings_of(DEVICE)
    assert str(cache) in str(refused.value)
    assert says in str(refused.value)


def test_what_does_not_go_with_the_plan_is_refused() -> None:
    plain = shapes.Shape(64, 128, torch.bfloat16, 90)
    name = plain.name("decode", 4, plain.decode(4))
    with pytest.raises(TuningError, match="decode is tuned to 16 rows and tiles of 32; allowed: 16 and 64"):
        shapes.Shape(64, 128, torch.bfloat16, 90, {name: Tiling(16, 32, 4, 3)}).decode(4)
    name = plain.name("prefill", 40, plain.prefill(40))
    with pytest.raises(TuningError, match="prefill is tuned to 32 rows; allowed: at least 40"):
        shapes.Shape(64, 128, torch.bfloat16, 90, {name: Tiling(32, 32, 4, 3)}).prefill(40)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert tuned.cache_directory() == tmp_path / "kernels"
    monkeypatch.delenv("BATON_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert tuned.cache_directory() == Path("/somewhere/baton/kernels")


def test_the_best_is_kept_only_if_it_is_better() -> None:
    chosen = Tiling(64, 32, 4, 2)
    fast, wrong, same = Tiling(64, 32, 8, 2), Tiling(64, 64, 8, 2), Tiling(64, 32, 4, 3)
    times = {chosen: 1.0, fast: 0.9, wrong: None, same: 0.99}
    assert best(chosen, [wrong, same, fast], times.__getitem__) == fast
    assert best(chosen, [chosen, wrong, same], times.__getitem__) is None


def test_every_candidate_of_every_subject_can_be_kept(cache: Path) -> None:
    for arch in (80, 90):
        every = [(subject.name, list(candidates(subject))) for subject in subjects(arch, torch.bfloat16)]
        every += [(one.name, list(expert_candidates(one))) for one in expert_subjects(arch, torch.bfloat16)]
        assert len({name for name, _ in every}) == len(every)
        for name, tried in every:
            assert len(tried) > 10
            for tiling in tried:
                assert all(getattr(tiling, field) in tuned.ALLOWED[field] for field in tuned.ALLOWED)
            write(cache, DEVICE, {name: tried[-1]})
            assert read(cache, DEVICE) == {name: tried[-1]}
