"""The bounds of a grammar. Those of size are checked at once; the others hold while it is tried out and used.

llguidance's own limits do not bound its compiling: a few hundred characters of intersected expressions keep
it busy for minutes, and rules that name each other 4,500 deep overflow its stack. So each grammar is first
tried out in a process of its own, which can be killed (``baton.grammar.trial``).
"""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_SOURCE_BYTES = 64 * 1024
"""Of a structured output's text, in UTF-8."""
MAX_DEPTH = 64
"""Of the objects and arrays in a JSON schema."""
MAX_CHOICES = 4096
JSON_SPACE = r"[ \n\r\t]{1,40}"
"""Between two tokens of JSON, unless the schema's ``x-guidance`` says otherwise: a model that has lost its
way would write spaces for ever."""
TRIAL_CPU_S = 0.6
"""Most CPU time of a trial: compiling, and the first masks."""
TRIAL_S = 0.9
"""Until a trial that has not used that up is given up."""
ALONE_S = 60.0
"""Until one ends itself: whoever asked, and would have given it up, may be gone."""
LITTLE_CPU_S = 0.2
"""Who has used less by then is not at fault: the machine is too busy to tell."""
REHEARSED_TOKENS = 24
"""Masks that a trial computes, each after a token that the one before allows."""
MASK_CPU_S = 0.05
"""Most CPU time for a mask in a trial: in the engine it holds up everyone's step."""
WALKS = 3
"""A grammar is refused for its masks when so many walks were too slow: what other guests of a host take of a
core may count as CPU time."""
TRIAL_BYTES = 2 << 30
"""Address space of the process that tries grammars out."""
TRIAL_STACK_BYTES = 1 << 20
"""Less than any thread of a worker has, so that a grammar that overflows a stack does it there."""
START_S = 30.0
"""Until a process for trials is there."""
MAX_QUEUED = 256
"""Grammars that wait to be compiled, of all tenants; of the reserve and of the rest, each."""
MAX_QUEUED_OF_TENANT = 64
"""Likewise, of one tenant."""
LANES = 2
"""Processes for trials at most. A tenant occupies one of them at a time, until it has been started again
where a trial was the death of it, so one tenant's hostile grammars leave the other process to the others."""
RESERVE_LANES = 1
"""Likewise for grammars that are known to be simple, which nothing else may hold up."""
TENANT_CPU_S = 20.0
"""CPU time of trials in a minute that a router grants a tenant, new starts of processes that they ended
included. Usual schemas take some milliseconds each, and only when they are new."""
SIMPLE_BYTES = 4096
"""Of the source of a simple grammar, at most."""
SIMPLE_DEPTH = 12
"""Of the objects and arrays in it."""
SIMPLE_PROPERTIES = 64
"""In all objects of a simple JSON schema."""
SIMPLE_OPTIONS = 16
"""Of one ``anyOf`` in it."""
CACHE_GRAMMARS = 256
CACHE_BYTES = 8 << 20
"""Of the sources in the cache."""


def parser_limits() -> LLParserLimits:
    """llguidance's own limits, far below its defaults, for trials and for the engine alike."""
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=50_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
