"""Loading a model directory's tokenizer, and its edges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import processors

from baton.text.config import Json
from baton.text.errors import TextTooLongError, TokenizerError, TooManyTokensError
from baton.text.tokenizer import MAX_BEYOND, PIECE_CHARS, Tokenizer
from tests.support.tiny_tokenizers import byte_fallback, byte_level, byte_level_tokenizer, write_model_dir


def test_round_trip_short_and_long(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(tmp_path)
    for text in ("", "Hello, 東京 🙂", "the quick brown fox 🙂 " * 3000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_by_name_and_id(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(tmp_path)
    assert tokenizer.special.eos_id == 0
    assert tokenizer.special.bos_id == 1
    assert tokenizer.special.ids == {0, 1}
    assert tokenizer.encode("<|end|>") == [0]
    assert tokenizer.decode([0]) == ""
    assert tokenizer.decode([0], skip_special_tokens=False) == "<|end|>"
    assert tokenizer.token(0) == "<|end|>"
    assert tokenizer.token(10**6) is None


def test_special_token_objects_and_the_older_map_file(tmp_path: Path) -> None:
    write_model_dir(tmp_path, byte_level(), {"bos_token": {"content": "<|start|>"}, "eos_token": None})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.special.by_name == {"bos_token": "<|start|>", "eos_token": "<|end|>"}


@pytest.mark.parametrize("template_adds", [True, False])
@pytest.mark.parametrize("add_bos", [True, False, None])
def test_the_first_token_follows_the_configuration(
    tmp_path: Path, template_adds: bool, add_bos: bool | None
) -> None:
    backend = byte_fallback()
    if template_adds:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    config: dict[str, object] = {"bos_token": "<s>"}
    if add_bos is not None:
        config["add_bos_token"] = add_bos
    tokenizer = Tokenizer.from_dir(write_model_dir(tmp_path, backend, config))
    expected = template_adds if add_bos is None else add_bos
    for text in ("fox", "", "fox " * 10_000):
        ids = tokenizer.encode(text)
        assert (ids[:1] == [1]) == expected
        assert 1 not in ids[1:]
        assert 1 not in tokenizer.encode(text, add_special_tokens=False)


def test_text_over_the_limit_is_refused_first(tmp_path: Path) -> None:
    write_model_dir(tmp_path, byte_level())
    tokenizer = Tokenizer.from_dir(tmp_path, max_chars=10)
    assert tokenizer.encode("0123456789")
    with pytest.raises(TextTooLongError, match=r"11 characters; at most 10"):
        tokenizer.encode("0123456789a")


@pytest.mark.parametrize("word", ["the quick fox ", "7", " ", "🙂", "<|end|>", "é"])
def test_a_text_is_counted_in_pieces_and_encoded_whole(tmp_path: Path, word: str) -> None:
    tokenizer = byte_level_tokenizer(tmp_path)
    text = word * (3 * PIECE_CHARS // len(word))
    ids = tokenizer.encode(text)
    assert tokenizer.encode(text, most=len(ids)) == ids, "a text that just fits has the ids of the whole"
    with pytest.raises(TooManyTokensError) as told:
        tokenizer.encode(text, most=len(ids) - 1)
    assert told.value.limit == len(ids) - 1


def test_no_text_of_many_more_tokens_is_encoded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_level_tokenizer(tmp_path)
    whole: list[int] = []
    encode = Tokenizer._encode

    def noted(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        whole.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_encode", noted)
    with pytest.raises(TooManyTokensError, match="more than 1000 tokens"):
        tokenizer.encode("7" * 4001 + " " * PIECE_CHARS, most=1000)
    assert not whole
    with pytest.raises(TooManyTokensError):
        tokenizer.encode("7" * (10**6 + MAX_BEYOND + 1), most=10**6)
    assert not whole
    assert len(tokenizer.encode("7" * (PIECE_CHARS + 1), most=PIECE_CHARS + 1)) == PIECE_CHARS + 1
    assert whole == [PIECE_CHARS + 1]


def test_truncation_in_the_file_is_not_obeyed(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_dir(write_model_dir(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("a b c d e f")) == "a b c d e f"


def test_errors_are_one_line_and_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="is not a directory"):
        Tokenizer.from_dir(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read as a tokenizer") as caught:
        Tokenizer.from_dir(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", '"x"', "\udcff", "[" * 100_000])
def test_a_broken_configuration_is_named(tmp_path: Path, content: str) -> None:
    write_model_dir(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text(content, errors="surrogateescape")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(tmp_path)


def test_the_chat_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    write_model_dir(tmp_path, byte_level(), {"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([{"role": "user", "content": "hi"}]) == "new hi"


def test_a_list_of_templates_gives_the_default(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    tokenizer = Tokenizer.from_dir(write_model_dir(tmp_path, byte_level(), {"chat_template": templates}))
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([]) == "d"


TOOLS: list[dict[str, Json]] = [{"type": "function", "function": {"name": "now"}}]


def test_chats_with_tools_have_the_template_that_is_for_them(tmp_path: Path) -> None:
    """Hermes' models have two; without the other one, tools would not be in the prompt at all."""
    named = {"default": "d", "tool_use": "{{ tools[0].function.name }} <tool_call>"}
    templates = [{"name": name, "template": source} for name, source in named.items()]
    for_tools = tmp_path / "additional_chat_templates"
    write_model_dir(tmp_path, byte_level(), {"chat_template": templates})
    in_list = Tokenizer.from_dir(tmp_path).chat_template
    for_tools.mkdir()
    (tmp_path / "chat_template.jinja").write_text(named["default"])
    (for_tools / "tool_use.jinja").write_text(named["tool_use"])
    in_files = Tokenizer.from_dir(tmp_path).chat_template
    for template in (in_list, in_files):
        assert template is not None
        assert template.render([], tools=TOOLS) == "now <tool_call>"
        assert template.render([]) == template.render([], tools=[]) == "d"
        assert template.tool_source == named["tool_use"]


def test_a_template_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="chat_template must be"):
        Tokenizer.from_dir(write_model_dir(tmp_path, byte_level(), {"chat_template": 5}))


DEMO_MODEL = Path(__file__).parents[2] / "services" / "baton" / "demo_model"


@pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not built")
def test_the_demo_model() -> None:
    tokenizer = Tokenizer.from_dir(DEMO_MODEL)
    text = "Once upon a time, there was a café 🙂."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer()
    assert "".join([*(detokenizer.push([id_]) for id_ in ids), detokenizer.finish()]) == text
    if tokenizer.chat_template is not None:
        assert "hi" in tokenizer.chat_template.render([{"role": "user", "content": "hi"}])
