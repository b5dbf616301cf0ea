"""Structured outputs are checked before any work is done for them, the same for every protocol."""

from __future__ import annotations

import asyncio

from baton.grammar.compiler import GrammarCompiler
from baton.grammar.errors import GrammarBusyError, GrammarError
from baton.grammar.table import TokenTable
from baton.router.api.errors import ApiError, invalid
from baton.structured_output import StructuredOutput
from baton.telemetry.grammar import GrammarStats
from baton.text.tokenizer import Tokenizer


class GrammarCheck:
    """Compiles grammars as the workers will, which compile them again: they trust nobody."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        eos = tokenizer.special.eos_id
        self._compiler = GrammarCompiler(
            lambda: TokenTable.of(tokenizer, tokenizer.vocab_size, [0 if eos is None else eos])
        )

    def stats(self) -> GrammarStats:
        return self._compiler.stats()

    async def check(self, param: str, output: StructuredOutput) -> StructuredOutput:
        """``output``, if it can be followed. ApiError, which names the field ``param``, if it cannot."""
        try:
            # Others may wait for the same: that one client leaves must not cancel it.
            await asyncio.shield(asyncio.wrap_future(self._compiler.compile(output)))
        except GrammarBusyError as error:
            raise ApiError(503, f"{param}: {error}.", param=param, code="overloaded") from None
        except GrammarError as error:
            raise invalid(param, f"{param} cannot be followed: {error}.") from None
        return output
