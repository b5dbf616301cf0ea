"""Chat templates: what they may use, and how they fail."""

from __future__ import annotations

import pytest

from baton.text.chat import ChatTemplate
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
