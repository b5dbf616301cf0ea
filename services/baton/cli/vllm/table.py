"""The table of all options of ``vllm serve``: the one place that says what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from baton.cli.vllm.option import VllmOption
from baton.cli.vllm.refused import EARLIER, REFUSED
from baton.cli.vllm.taken import TAKEN

VERSION = "0.32.0"
"""The release of vLLM whose options these are."""

OPTIONS: tuple[VllmOption, ...] = (*TAKEN, *REFUSED)
"""All options of that release, ``--help`` excepted."""

BY_NAME: Mapping[str, VllmOption] = MappingProxyType(
    {name: option for option in (*OPTIONS, *EARLIER) for name in option.names}
)
"""Each by every spelling, with a few of earlier releases."""
