"""Whether a model reasons before it answers: from the wishes in requests to variables of chat templates."""

from __future__ import annotations

from baton.router.api.errors import invalid, shown
from baton.router.api.http.openai.tool_calls import CallPolicy
from baton.text.config import Json
from baton.text.tokenizer import Tokenizer

SWITCH, EFFORT = "enable_thinking", "reasoning_effort"
"""Variables of chat templates: those of Qwen3 and its successors, and those of models with grades of
effort."""

USUAL_EFFORT = "medium"
EFFORTS = ("none", "minimal", "low", USUAL_EFFORT, "high", "xhigh", "max")


class Thinking:
    """The variables for reasoning that the served model's template understands."""

    def __init__(self, tokenizer: Tokenizer, calls: CallPolicy) -> None:
        template = tokenizer.chat_template
        source = "" if template is None else template.source
        self._reasons = calls.tells_reasoning
        self._has_switch = SWITCH in source
        self._has_grades = EFFORT in source

    def switched(self, on: bool, param: str) -> dict[str, Json]:
        """Return the template's variables for a request that wants reasoning, or wants none.

        Raises RequestError if the model cannot do so.
        """
        if on and not self._reasons:
            raise invalid(
                param,
                f"{param} asks for reasoning, but this server knows no format of this model's; its router "
                "can be told one (--reasoning-parser).",
                "unsupported",
            )
        if not on and self._reasons and not self._has_switch:
            raise invalid(
                param,
                f"{param} asks for no reasoning, but this model's chat template cannot turn it off.",
                "unsupported",
            )
        return {SWITCH: on} if self._has_switch else {}

    def usually_off(self) -> dict[str, Json]:
        """Return the variables for a protocol that has no reasoning unless a request asks for it."""
        return {SWITCH: False} if self._has_switch else {}

    def if_able(self) -> dict[str, Json]:
        """Return the variables for a request in which the model chooses how much to reason, which may be
        nothing."""
        return {SWITCH: True} if self._reasons and self._has_switch else {}

    def wished(self, effort: str) -> dict[str, Json]:
        """Return the variables for an effort that is a wish and promises nothing."""
        return {EFFORT: effort} if self._has_grades else {}

    def graded(self, effort: str, param: str) -> dict[str, Json]:
        """Return the variables for one of ``EFFORTS``. A grade is a wish; see `heeds`. Raises RequestError
        for another, and for none if the model cannot do without reasoning."""
        if effort not in EFFORTS:
            raise invalid(param, f"{param} must be one of {', '.join(EFFORTS)}, not {shown(effort)}.")
        if effort == "none":
            return self.switched(False, param)
        return {**self.if_able(), **self.wished(effort)}

    def heeds(self, effort: str | None) -> bool:
        """Whether the model reasons as an effort says: it knows grades, or the effort is no grade of how
        much."""
        if effort in (None, "none"):
            return True
        return self._has_grades or (self._reasons and effort == USUAL_EFFORT)
