"""The inputs that the layers of a model have in common in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from baton_kernels.attention import AttentionPlan
from baton_kernels.kv_layout import KVGroup
from baton_kernels.latent import LatentPlan
from baton_kernels.paged import StateRows

TablePlan: TypeAlias = AttentionPlan | LatentPlan
"""The plan of the layers of one table."""


def attention_plan(plans: Sequence[TablePlan], table: int) -> AttentionPlan:
    """The plan of a table of K and V."""
    plan = plans[table]
    assert isinstance(plan, AttentionPlan), f"table {table} holds latents"
    return plan


def latent_plan(plans: Sequence[TablePlan], table: int) -> LatentPlan:
    """The plan of a table of latents."""
    plan = plans[table]
    assert isinstance(plan, LatentPlan), f"table {table} holds K and V"
    return plan


@dataclass(frozen=True, slots=True)
class Narrow:
    """The inputs of a last layer that yields some rows alone."""

    rows: Tensor
    """[R] int64: the indices of the rows, at least one."""
    plans: Sequence[TablePlan]
    """The plans of these rows, by table."""


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of a rotation, both [T, 1, head_dim], the first half of the sines negated: see
``baton_kernels.rotary.rotate``."""


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of every layer in one forward pass, besides the activations."""

    views: Sequence[Tensor]
    """The pool as the blocks of each table, [blocks, heads, layers, vectors, block_size, dim]."""
    plans: Sequence[TablePlan]
    """The plan of each table."""
    rotations: Sequence[Rotation]
    """The rotations of each kind of layer."""
    query_factors: Tensor | None = None
    """[T, 1, 1] float32: the factor of each token's queries (``QueryScale``); None: 1."""
    states: States | None = None
    """The states that layers keep; None: no layer keeps any."""


@dataclass(frozen=True, slots=True)
class States:
    """The states of a step's sequences."""

    pages: Tensor
    """[num_pages, numbers] float32: the whole pool."""
    rows: StateRows
    group: KVGroup
    """The group of the layers: cell ``layer * units + unit``, of ``size`` numbers, is the cell
    ``% per_page`` of the page that the table ``// per_page`` names, where ``layer`` is ``KVPlace.index``."""
