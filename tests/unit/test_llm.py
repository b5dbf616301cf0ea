"""The engine without a server, against transformers."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import baton
from baton import LLM, SamplingParams, StructuredOutputs
from baton.engine.config import EngineConfig
from baton.engine.execution import StepResult
from baton.engine.scheduler import ScheduledBatch
from baton.grammar import compiler, lanes
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.table import TokenTable
from baton.request.errors import RequestError
from tests.support.tiny_models import EOS, IM_END, TINY_MODELS, load_oracle

PROMPTS = ["Baton", "a longer prompt, with words", "é世🌍", "x" * 70]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS["qwen3"](tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(str(path), dtype="float32", device="cpu", num_blocks=64, max_num_batched_tokens=64)


@torch.inference_mode()
def generated(path: Path, prompt_ids: list[int], n: int) -> list[int]:
    """What transformers' own ``generate`` answers, greedily."""
    output = load_oracle(path).generate(  # type: ignore[operator]
        torch.tensor([prompt_ids]),
        max_new_tokens=n,
        do_sample=False,
        eos_token_id=[EOS, IM_END],
        pad_token_id=0,
    )
    return [int(id_) for id_ in output[0, len(prompt_ids) :]]


def test_greedy_is_transformers_generate(llm: LLM, path: Path) -> None:
    results = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24), progress=False)
    assert [result.prompt for result in results] == PROMPTS
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = llm.tokenizer.encode(prompt)
        assert list(result.prompt_token_ids) == ids
        [answer] = result.outputs
        assert list(answer.token_ids) == generated(path, ids, 24)
        assert answer.finish_reason == ("length" if len(answer.token_ids) == 24 else "stop")
        assert answer.text == llm.tokenizer.decode(list(answer.token_ids)).rstrip("�")


def test_texts_and_ids_alone_and_in_lists_are_the_same_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    ids = llm.tokenizer.encode("Baton")
    [text] = llm.generate("Baton", params, progress=False)
    [tokens] = llm.generate(ids, params, progress=False)
    both: list[str | Sequence[int]] = ["Baton", ids]
    mixed = llm.generate(both, params, progress=False)
    assert {result.outputs[0].token_ids for result in (text, tokens, *mixed)} == {text.outputs[0].token_ids}
    assert (text.prompt, tokens.prompt) == ("Baton", None)


def test_each_prompt_has_its_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n) for n in (1, 5, 9)]
    results = llm.generate(["a"] * 3, params, progress=False)
    assert [len(result.outputs[0].token_ids) for result in results] == [1, 5, 9]
    assert [len(r.outputs[0].token_ids) for r in llm.generate(["a"], progress=False)] <= [16]


def test_n_answers_are_those_of_their_seeds(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=7, temperature=1.5, max_tokens=12, ignore_eos=True)
    [first], [again] = (llm.generate("Baton", params, progress=False) for _ in range(2))
    assert [answer.index for answer in first.outputs] == [0, 1, 2, 3]
    assert len({answer.token_ids for answer in first.outputs}) == 4
    assert first.outputs == again.outputs
    unseeded = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    drawn = {r.outputs[0].token_ids for r in llm.generate(["Baton"] * 3, unseeded, progress=False)}
    assert len(drawn) == 3


def test_a_character_that_the_end_cuts_off_is_left_out(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=["é".encode()[0]])
    [result] = llm.generate("Baton", params, progress=False)
    assert (result.outputs[0].text, len(result.outputs[0].token_ids)) == ("", 3)


def test_a_stop_string_ends_one_answer_and_its_blocks_are_free(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    [whole] = llm.generate("Baton", plain, progress=False)
    text = whole.outputs[0].text
    stop = text[8:10]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop, "never there"])
    [cut, other] = llm.generate(["Baton", "Baton"], [params, plain], progress=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert other.outputs == whole.outputs
    load = llm.engine.stats()
    assert (load.running, load.waiting, load.blocks.held) == (0, 0, 0)


def test_a_stop_string_may_stay_in_the_text(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    text = llm.generate("Baton", plain, progress=False)[0].outputs[0].text
    stop = text[8:10]
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, stop=stop, include_stop_str_in_output=True
    )
    [answer] = llm.generate("Baton", params, progress=False)[0].outputs
    assert answer.text == text[: text.index(stop) + len(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_tokens_alone(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    silent = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
    [told, alone] = llm.generate(["Baton", "Baton"], [plain, silent], progress=False)
    assert told.outputs[0].token_ids == alone.outputs[0].token_ids
    assert (bool(told.outputs[0].text), alone.outputs[0].text) == (True, "")


def test_prompts_are_cut(llm: LLM) -> None:
    text, ids = PROMPTS[1], llm.tokenizer.encode(PROMPTS[1])
    left = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=5)
    right = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=5, truncation_side="right")
    fill = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=-1)
    prompts: list[str | list[int]] = [text, text, ids, "x" * 5000]
    results = llm.generate(prompts, [left, right, left, fill], progress=False)
    kept = [list(result.prompt_token_ids) for result in results]
    assert kept[:3] == [ids[-5:], ids[:5], ids[-5:]]
    assert len(kept[3]) == llm.model.max_model_len - 1 and len(results[3].outputs[0].token_ids) == 1
    with pytest.raises(RequestError, match="truncate_prompt_tokens must be -1") as refused:
        llm.generate(["a", "b"], [left, SamplingParams(truncate_prompt_tokens=0)], progress=False)
    assert refused.value.param == "params[1].truncate_prompt_tokens"


def test_a_chat_goes_on_with_its_last_message(llm: LLM, path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    params = SamplingParams(temperature=0, max_tokens=6)
    [chat] = llm.chat(messages, params, continue_final_message=True, progress=False)
    oracle = AutoTokenizer.from_pretrained(path)
    expected = oracle.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert llm.tokenizer.decode(list(chat.prompt_token_ids), skip_special_tokens=False) == expected
    with pytest.raises(RequestError, match="are both true"):
        llm.chat(messages, params, add_generation_prompt=True, continue_final_message=True, progress=False)


def test_the_bar_is_for_a_terminal(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    llm.generate("Baton", SamplingParams(max_tokens=2))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes rich take it for one
    llm.generate("Baton", SamplingParams(max_tokens=2))
    out, err = capsys.readouterr()
    assert (out, "1/1" in err) == ("", True)


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, steps = llm.engine.runner.run, iter(range(3))

    def interrupted(batch: ScheduledBatch) -> StepResult:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return compute(batch)

    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    whole = llm.generate(PROMPTS, params, progress=False)
    monkeypatch.setattr(llm.engine.runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, params, progress=False)
    load = llm.engine.stats()
    assert (load.running, load.waiting, load.blocks.held) == (0, 0, 0)
    monkeypatch.undo()
    again = llm.generate(PROMPTS, params, progress=False)
    assert [result.outputs for result in again] == [result.outputs for result in whole]


def test_log_probabilities_are_the_models(llm: LLM, path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    [result] = llm.generate("Baton", params, progress=False)
    [answer] = result.outputs
    ids = [*result.prompt_token_ids, *answer.token_ids]
    with torch.inference_mode():
        told = load_oracle(path)(torch.tensor([ids])).logits[0].float().log_softmax(dim=-1)
    prompt = len(result.prompt_token_ids)
    assert answer.logprobs is not None and result.prompt_logprobs is not None
    expected = [float(told[at - 1, ids[at]]) for at in range(1, len(ids))]
    assert list(result.prompt_logprobs.chosen) == pytest.approx(expected[: prompt - 1], abs=1e-4)
    assert list(answer.logprobs.chosen) == pytest.approx(expected[prompt - 1 :], abs=1e-4)
    assert [id_ for id_, _ in answer.logprobs.top_of(0, 2)] == told[prompt - 1].topk(2).indices.tolist()


def test_a_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    params = SamplingParams(temperature=0, max_tokens=6)
    [chat] = llm.chat(messages, params, progress=False)
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert llm.tokenizer.decode(list(chat.prompt_token_ids), skip_special_tokens=False) == rendered
    several = llm.chat([messages, messages], params, progress=False)
    assert [result.outputs for result in several] == [chat.outputs] * 2


@pytest.mark.parametrize(
    ("prompts", "params", "param", "message"),
    [
        (["a", ""], None, "prompts[1]", "empty"),
        ([[1, 99_999]], None, "prompts[0]", "token ids are 0 to 319"),
        (["a", ["b"]], None, "prompts[1]", "a text or token ids"),
        (["a" * 2000], None, "prompts[0]", "context"),
        ("a", SamplingParams(temperature=3), "temperature", "between 0 and 2, not 3"),
        ("a", SamplingParams(temperature="hot"), "temperature", "got str"),  # type: ignore[arg-type]
        ("a", SamplingParams(logit_bias={5: 1.0}), "logit_bias", "got int"),  # type: ignore[dict-item]
        ("a", SamplingParams(max_tokens=5000), "max_tokens", "at most"),
        ("a", SamplingParams(n=0), "n", "between 1 and 128, not 0"),
        ("a", SamplingParams(stop=[""]), "stop", "empty"),
        (["a", "b"], [SamplingParams()], "params", "1 entries for 2 prompts"),
        (["a", "b"], [SamplingParams(), SamplingParams(top_p=0)], "params[1].top_p", "above 0"),
    ],
)
def test_bad_input_is_named_before_anything_runs(
    llm: LLM, prompts: list[str], params: SamplingParams | None, param: str, message: str
) -> None:
    before = llm.engine.stats().generated_tokens
    with pytest.raises(RequestError, match=message) as refused:
        llm.generate(prompts, params, progress=False)
    assert refused.value.param == param
    assert llm.engine.stats().generated_tokens == before


def test_a_form_is_followed_by_each_prompt_that_asks_for_it(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    forms = [
        StructuredOutputs(choice=["prefill", "decode"]),
        StructuredOutputs(json={**schema, "additionalProperties": False}),
        StructuredOutputs(regex="[a-c]{3}"),
        None,
    ]
    asked = [SamplingParams(max_tokens=60, seed=2, structured_outputs=form) for form in forms]
    choice, json_object, regex, free = (
        result.outputs[0].text for result in llm.generate([PROMPTS[0]] * 4, asked, progress=False)
    )
    assert choice in ("prefill", "decode")
    assert set(json.loads(json_object)) == {"a"}
    assert len(regex) == 3 and set(regex) <= set("abc")
    assert free not in (choice, json_object, regex)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (StructuredOutputs(), "exactly one of json"),
        (StructuredOutputs(regex="a", choice=["b"]), "not regex and choice"),
        (StructuredOutputs(regex="("), "cannot be followed"),
        (StructuredOutputs(regex=3), "got int"),  # type: ignore[arg-type]
    ],
)
def test_a_form_that_cannot_be_is_refused(llm: LLM, form: StructuredOutputs, message: str) -> None:
    params = [SamplingParams(), SamplingParams(structured_outputs=form)]
    with pytest.raises(RequestError, match=message) as refused:
        llm.generate(["a", "b"], params, progress=False)
    assert str(refused.value.param).startswith("params[1].structured_outputs")


def test_more_forms_than_are_kept_are_followed_all_the_same(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "CACHE_GRAMMARS", 2)
    monkeypatch.setattr(lanes, "MAX_QUEUED", 1)
    tokens = partial(TokenTable.of, llm.tokenizer, llm.engine.vocab_size, sorted(llm.engine.eos_token_ids))
    monkeypatch.setattr(llm.engine, "grammars", GrammarCompiler(tokens))
    params = [
        SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(choice=[f"{i}"])) for i in range(9)
    ]
    results = llm.generate(["Baton"] * 9, params, progress=False)
    assert [result.outputs[0].text for result in results] == [f"{i}" for i in range(9)]
    assert llm.engine.grammars is not None
    assert llm.engine.grammars.stats().compiled == 9
    llm.engine.grammars.close()


def test_an_answer_that_cannot_go_on_ends_alone(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [whole] = llm.generate("Baton", plain, progress=False)
    [a] = llm.tokenizer.encode("a", add_special_tokens=False)
    at_once, later = (
        SamplingParams(
            n=n,
            seed=1,
            structured_outputs=StructuredOutputs(regex=form),
            allowed_token_ids=[a],
            stop="a stop",
        )
        for n, form in ((2, "b"), (1, "ab"))
    )
    before, none, some, after = llm.generate(["Baton"] * 4, [plain, at_once, later, plain], progress=False)
    assert before.outputs == after.outputs == whole.outputs
    for answer in (*none.outputs, *some.outputs):
        assert answer.finish_reason == "error"
        assert "together leave no token" in str(answer.error)
    assert [(answer.text, answer.token_ids) for answer in none.outputs] == [("", ())] * 2
    assert (some.outputs[0].text, some.outputs[0].token_ids) == ("a", (a,))
    load = llm.engine.stats()
    assert (load.running, load.waiting, load.blocks.held) == (0, 0, 0)


def test_bad_messages_are_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match="role"):
        llm.chat([{"role": "nobody", "content": "x"}], progress=False)
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        llm.chat([{"content": "x"}], progress=False)
    chats = [[{"role": "user", "content": "x"}], [{"role": "nobody", "content": "x"}]]
    with pytest.raises(RequestError, match=r"messages\[1\]: messages\[0\]\.role must be") as refused:
        llm.chat(chats, progress=False)
    assert refused.value.param == "messages[1]"


def test_an_option_that_there_is_not(path: Path) -> None:
    with pytest.raises(TypeError, match="num_blokcs"):
        LLM(str(path), num_blokcs=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="block_size is 0"):
        LLM(str(path), block_size=0)


def test_the_options_are_the_engines() -> None:
    """They are arguments with names, types and defaults, for an editor and for type checkers."""
    arguments = inspect.signature(LLM).parameters
    found = {"device_bytes"}  # which the engine is told, and nobody chooses
    settings = {field.name: field.default for field in fields(EngineConfig) if field.name not in found}
    defaults = settings | {"model": "demo", "device": "auto", "generation_config": "auto"}
    assert {name: one.default for name, one in arguments.items()} == defaults
    assert [one.name for one in arguments.values() if one.kind is not one.KEYWORD_ONLY] == ["model"]
    assert arguments["block_size"].annotation == int | None


def test_the_package_is_light_and_names_what_it_has() -> None:
    program = (
        "import sys, baton; assert 'torch' not in sys.modules and 'msgspec' not in sys.modules; "
        "from baton import SamplingParams; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
    assert {getattr(baton, name) for name in baton.__all__}
    with pytest.raises(AttributeError, match="nothing_there"):
        baton.nothing_there  # noqa: B018
