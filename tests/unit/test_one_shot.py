"""Sums in one kernel: which tensors take it, and that ranks go the same way; the kernel itself is torch's."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from baton.parallel import collectives, one_shot
from baton.parallel.collectives import GroupCollectives
from baton.parallel.one_shot import MOST_BYTES, OneShotSum, agreed, why_not
from baton.parallel.shard import Shard, StateSplit


@dataclass(frozen=True)
class Sizes:
    """What a shard asks of a model."""

    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 8
    head_dim: int = 4
    intermediate_size: int = 16
    vocab_size: int = 64
    inner_sizes: tuple[int, ...] = (16,)
    state_splits: tuple[StateSplit, ...] = ()


def test_it_takes_small_tensors_that_the_kernel_knows() -> None:
    one = OneShotSum(torch.zeros(4096, dtype=torch.uint8), "g")
    assert one.takes(torch.zeros(2, 1024, dtype=torch.bfloat16))
    assert one.takes(torch.zeros(1024))
    assert not one.takes(torch.zeros(1028)), "more bytes than the buffer has"
    assert not one.takes(torch.zeros(8, dtype=torch.float16))
    assert not one.takes(torch.zeros(3)), "no whole number of the kernel's words"
    assert not one.takes(torch.zeros(0))
    assert not one.takes(torch.zeros(8, 8)[:, :4])


def test_the_kernel_is_given_a_part_of_the_buffer_like_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)

    def kernel(shared: Tensor, partial: Tensor, how: str, group: str) -> Tensor:
        assert (how, group) == ("sum", "g")
        assert (shared.shape, shared.dtype) == (partial.shape, partial.dtype), "torch refuses others"
        assert shared.data_ptr() == buffer.data_ptr()
        return partial + 1

    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_copy", kernel)
    partial = torch.arange(64.0).view(4, 16).bfloat16()
    assert torch.equal(OneShotSum(buffer, "g")(partial), partial + 1)


def test_what_speaks_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (0, 3))
    assert why_not([0, 1], on_one_node=True) == ""
    assert why_not([1, 0, 2, 3], on_one_node=True) == ""
    assert why_not([0, 1, 2, 3], on_one_node=True) == "a device cannot read another's memory"
    assert why_not([0, 1, 2], on_one_node=True) == "3 ranks; it takes 2, 4, 8"
    assert why_not([0, 1], on_one_node=False) == "the ranks are on several nodes"


def test_all_must_agree() -> None:
    assert agreed("", lambda mine: mine + 3, 4)
    assert not agreed("", lambda mine: mine + 2, 4)
    assert not agreed("no", lambda mine: mine + 3, 4)


@dataclass
class Votes:
    """The sums that a rank gets of a group of ``size``, whose other ranks all say ``others``."""

    size: int
    others: list[int]
    mine: list[int] = field(default_factory=list)

    def __call__(self, number: int) -> int:
        self.mine.append(number)
        return number + (self.size - 1) * self.others[len(self.mine) - 1]


def shared(
    monkeypatch: pytest.MonkeyPatch, votes: Votes, error: str | None = None, per_node: int | None = None
) -> OneShotSum | None:
    """What rank 1 of two finds, on the second device."""
    made = OneShotSum(torch.zeros(64, dtype=torch.uint8), "g")

    def share_buffer(*asked: object) -> OneShotSum:
        assert asked[1:] == ("baton-tp0", 1, 2, torch.device("cuda", 1))
        if error is not None:
            raise RuntimeError(error)
        return made

    monkeypatch.setattr(collectives, "share_buffer", share_buffer)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) == (1, 0))
    of_rank = GroupCollectives(
        Shard.of(Sizes(), 1, 2, 1),
        torch.device("cuda", 1),
        per_node=per_node,
    )
    monkeypatch.setattr(of_rank, "_count", votes)
    found = of_rank._share(torch.distributed.HashStore(), "baton-tp0")  # type: ignore[attr-defined]
    assert found in (None, made)
    return found


def test_a_rank_says_which_way_sums_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert shared(monkeypatch, Votes(2, [1, 1])) is not None
    assert caplog.messages == [f"sums of up to {MOST_BYTES[2]} bytes take one kernel, larger ones NCCL"]


@pytest.mark.parametrize(
    ("others", "error", "per_node", "mine", "reason"),
    [
        ([0], None, None, [1], "another rank cannot sum in one kernel"),
        ([1, 0], None, None, [1, 1], "another rank cannot sum in one kernel"),
        ([1, 1], "no fabric\nat all", None, [1, 0], "no fabric"),
        ([1], None, 1, [0], "the ranks are on several nodes"),
    ],
)
def test_one_that_cannot_keeps_all_from_it(
    others: list[int],
    error: str | None,
    per_node: int | None,
    mine: list[int],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    votes = Votes(2, others)
    assert shared(monkeypatch, votes, error, per_node) is None
    assert votes.mine == mine, "it answers as often as the others ask"
    assert caplog.messages == [f"all sums take NCCL: {reason}"]


@dataclass
class Doubling:
    """A group in which every rank has the same."""

    sums: int = 0

    def allreduce(self, tensors: list[Tensor]) -> Doubling:
        self.sums += 1
        tensors[0] *= 2
        return self

    def wait(self) -> None: ...


def test_large_tensors_take_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank = GroupCollectives(Shard.of(Sizes(), 0, 2, 1), torch.device("cpu"))
    group = Doubling()
    of_rank._sums = group  # type: ignore[assignment]
    of_rank._one_shot = OneShotSum(torch.zeros(64, dtype=torch.uint8), "g")
    monkeypatch.setattr(
        torch.ops.symm_mem, "one_shot_all_reduce_copy", lambda shared, partial, how, group: partial * 2
    )
    for count, by_group in ((16, 0), (32, 1)):
        assert torch.equal(of_rank.sum(torch.ones(count)), torch.full((count,), 2.0))
        assert group.sums == by_group


def test_the_numbers_of_ranks_are_torchs() -> None:
    assert set(one_shot.MOST_BYTES) == {2, 4, 8}
