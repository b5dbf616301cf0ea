"""Chat templates: what they may use, and how they fail."""

from __future__ import annotations

import time

import pytest

from baton.text.chat import ChatTemplate
from baton.text.config import Json
from baton.text.errors import ChatTemplateError, TextTooLongError

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str, **arguments: str) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        MESSAGES, arguments=arguments
    )


def test_hugging_face_names() -> None:
    source = """{{ bos_token }}
    {%- for message in messages %}
        {%- if loop.index0 == 5 %}{% break %}{% endif %}
        {%- generation %}{{ message['role'] }}:{{ message.content | tojson }}{% endgeneration %}
    {%- endfor %}{% if tools is none and add_generation_prompt %}!{% endif %}"""
    assert render(source) == '<s>user:"hi"!'


def test_blocks_are_trimmed_as_hugging_face_does() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_tojson_does_not_escape_html_and_keeps_unicode() -> None:
    assert render("{{ '<é>' | tojson }}") == '"<é>"'


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_a_requests_arguments_are_variables_but_cannot_replace_the_messages() -> None:
    assert render("{{ tone }} {{ messages[0].content }}", tone="warm", messages="none") == "warm hi"


def test_the_generation_prompt_can_be_left_out() -> None:
    template = ChatTemplate("{% if add_generation_prompt %}go{% endif %}", {})
    assert template.render(MESSAGES, add_generation_prompt=False) == ""


ROLES = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"


def said(*roles: str) -> list[dict[str, Json]]:
    return [{"role": role, "content": f"{number}"} for number, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("roles", "told"),
    [
        (("developer", "user"), "[system: 0][user: 1]"),
        (("system", "developer", "user"), "[system: 0\n\n1][user: 2]"),
        (("developer", "developer", "user"), "[system: 0\n\n1][user: 2]"),
        (("user", "developer"), "[user: 0][system: 1]"),
        (("system", "system", "user"), "[system: 0][system: 1][user: 2]"),
    ],
)
def test_developers_are_system_to_a_template_that_does_not_know_them(
    roles: tuple[str, ...], told: str
) -> None:
    messages = said(*roles)
    assert ChatTemplate(ROLES, {}).render(messages) == told
    assert [message["role"] for message in messages] == list(roles)
    knows = ChatTemplate(ROLES + "{% if messages[0].role == 'developer' %}{% endif %}", {})
    assert knows.render(messages).startswith(f"[{roles[0]}: 0][{roles[1]}: 1]")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[9].content }}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render"),
        ("{% if %}", "does not compile"),
        ("{{ messages.__class__.__mro__ }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ 'a' * 1000000000 }}", "repeats a text too often"),
        ("{{ 1000000000 * [1] }}", "repeats a text too often"),
        ("{{ 10 ** 10000000 }}", "powers"),
        ("{% for i in range(1000000000) %}{% endfor %}", "cannot render"),
    ],
)
def test_a_failing_template_says_why(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(source)


def test_output_is_bounded() -> None:
    source = "{% for i in range(1000) %}{% for j in range(1000) %}text{% endfor %}{% endfor %}"
    with pytest.raises(TextTooLongError):
        ChatTemplate(source, {}, max_chars=1000).render(MESSAGES)


def test_many_developers_take_time_in_proportion() -> None:
    """A text that grows by each message would be copied 20,000 times: seconds."""
    template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})
    messages: list[dict[str, Json]] = [{"role": "developer", "content": "a" * 400} for _ in range(20_000)]
    began = time.process_time()
    text = template.render(messages)
    assert time.process_time() - began < 1
    assert len(text) == 402 * 20_000 - 2
