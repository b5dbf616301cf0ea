"""The limits of a grammar. Limits of size are checked at once; the others hold while the grammar is tried out
and used.

llguidance's own limits do not bound its compiling: a few hundred characters of intersected expressions keep
it busy for minutes, and rules that name each other 4,500 deep overflow its stack. So each grammar is first
tried out in a process of its own, which can be killed (``baton.grammar.trial``).
"""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_SOURCE_BYTES = 64 * 1024
"""Most bytes of a structured output's text, in UTF-8."""
MAX_DEPTH = 64
"""Deepest nesting of the objects and arrays in a JSON schema."""
MAX_CHOICES = 4096
JSON_SPACE = r"[ \n\r\t]{1,40}"
"""The white space between two tokens of JSON, unless the schema's ``x-guidance`` says otherwise: without a
limit, a model that has lost its way would write spaces for ever."""
TRIAL_CPU_S = 0.6
"""Most CPU time of a trial, which compiles and computes the first masks, in seconds."""
TRIAL_S = 0.9
"""The time after which a trial is given up that has not used up ``TRIAL_CPU_S``, in seconds."""
ALONE_S = 60.0
"""The time after which a trial's process ends itself, in seconds: the worker, which would have given it up,
may be gone."""
LITTLE_CPU_S = 0.2
"""The CPU time below which a trial that was given up is not at fault, in seconds: the machine is too busy to
tell."""
REHEARSED_TOKENS = 24
"""Masks that a trial computes, each after a token that the previous mask allows."""
MASK_CPU_S = 0.05
"""Most CPU time for a mask in a trial, in seconds: in the engine it holds up every request's step."""
WALKS = 3
"""Walks that all must be too slow before a grammar is refused for its masks: time that a host's other guests
take of a core may count as CPU time."""
TRIAL_BYTES = 2 << 30
"""Most address space of the process that tries grammars out."""
TRIAL_STACK_BYTES = 1 << 20
"""The stack of that process: less than any thread of a worker has, so that a grammar that overflows a stack
does it there."""
START_S = 30.0
"""The time until a process for trials has started, in seconds."""
MAX_QUEUED = 256
"""Most grammars that wait to be compiled, of all tenants; the reserve and the rest have this limit each."""
MAX_QUEUED_OF_TENANT = 64
"""Most grammars of one tenant that wait to be compiled; the reserve and the rest have this limit each."""
LANES = 2
"""Most processes for trials. A tenant occupies one of them at a time, until it has been started again after a
trial that killed it, so one tenant's hostile grammars leave the other process to the others."""
RESERVE_LANES = 1
"""Most processes for trials of grammars that are known to be simple, which no other grammar may hold up."""
TENANT_CPU_S = 20.0
"""CPU time of trials in a minute that a router grants a tenant, in seconds, restarts of killed processes
included. Usual schemas take some milliseconds each, and only when they are new."""
SIMPLE_BYTES = 4096
"""Most bytes of the source of a simple grammar."""
SIMPLE_DEPTH = 12
"""Deepest nesting of the objects and arrays in a simple JSON schema."""
SIMPLE_PROPERTIES = 64
"""Most properties of all objects in a simple JSON schema."""
SIMPLE_OPTIONS = 16
"""Most options of one ``anyOf`` in a simple JSON schema."""
CACHE_GRAMMARS = 256
CACHE_BYTES = 8 << 20
"""Most bytes of the sources in the cache."""


def parser_limits() -> LLParserLimits:
    """Return llguidance's own limits, far below its defaults, for trials and for the engine alike."""
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
