"""Settings for every test."""

from __future__ import annotations

import torch

# The models here are tiny: handing their operations to more threads costs more than computing them.
torch.set_num_threads(1)
