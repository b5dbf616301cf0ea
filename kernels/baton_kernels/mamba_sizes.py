"""The sizes of a Mamba-2 layer, or of a rank's part of one. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """The sizes of a rank's part of a layer."""

    units: int
    """Parts of the heads, each of which has a cell of its own."""
    heads: int
    """Heads of a unit."""
    head_dim: int
    groups: int
    """Groups of heads that have B and C in common, of all units."""
    state_dim: int
    conv_kernel: int

    @property
    def unit_groups(self) -> int:
        """Groups of a unit; units of a part of a group have one."""
        return max(1, self.groups // self.units)

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.units * self.heads * self.head_dim

    @property
    def columns(self) -> int:
        """Numbers that a token is projected to: z, x, B, C and dt."""
        return 2 * self.inner + 2 * self.groups * self.state_dim + self.units * self.heads

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels of a unit's convolutions: its x, its B, its C."""
        of_groups = self.unit_groups * self.state_dim
        return self.heads * self.head_dim, of_groups, of_groups

    @property
    def unit_channels(self) -> int:
        return sum(self.channels)

    @property
    def state_size(self) -> int:
        """Numbers of the states of a unit's heads."""
        return self.heads * self.head_dim * self.state_dim

    def first_group(self, unit: int) -> int:
        """The first group of a unit, among those that are here."""
        return unit * self.groups // self.units
