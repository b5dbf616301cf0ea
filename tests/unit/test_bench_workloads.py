"""The workloads of ``baton bench``: what is drawn, and what is read from files, good and bad."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from baton import hub
from baton.bench.workload.choice import make_items
from baton.bench.workload.config import WorkloadConfig
from baton.bench.workload.items import Item, PromptPiece, WorkloadError, fit
from baton.bench.workload.vocabulary import Vocabulary
from baton.process.options import ConfigError
from baton.text.tokenizer import Tokenizer

MOONCAKE = [
    {"timestamp": 1000, "input_length": 1030, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"timestamp": 1500.5, "input_length": 600, "output_length": 9, "hash_ids": [7, 8]},
]
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
6,ChatGPT,30,0,30,Conversation log
45.5,GPT-4,12,7,19,API log
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(hub.resolve_model("demo"))


def made(tokenizer: Tokenizer, **options: object) -> list[Item]:
    return make_items(WorkloadConfig(**options), tokenizer)  # type: ignore[arg-type]


class TestDrawn:
    def test_lengths_keep_to_their_range(self, tokenizer: Tokenizer) -> None:
        items = made(tokenizer, num_prompts=400, input_len=100, output_len=20, range_ratio=0.5)
        prompts, answers = [i.prompt_tokens for i in items], [i.output_tokens for i in items]
        assert (min(prompts), max(prompts)) == (50, 150)
        assert (min(answers), max(answers)) == (10, 30)
        assert statistics.mean(prompts) == pytest.approx(100, rel=0.1)

    def test_without_a_range_they_are_exact(self, tokenizer: Tokenizer) -> None:
        assert {(i.prompt_tokens, i.output_tokens) for i in made(tokenizer)} == {(128, 32)}

    def test_prompts_are_as_long_as_they_say_and_have_no_special_tokens(self, tokenizer: Tokenizer) -> None:
        vocabulary = Vocabulary(tokenizer)
        for item in made(tokenizer, num_prompts=5, workload="shared-prefix"):
            ids = vocabulary.ids(item)
            assert len(ids) == item.prompt_tokens == 256 + 128
            assert not tokenizer.special.ids & set(ids)

    def test_the_seed_decides(self, tokenizer: Tokenizer) -> None:
        vocabulary = Vocabulary(tokenizer)
        first, again, other = (made(tokenizer, seed=seed) for seed in (1, 1, 2))
        assert first == again
        assert vocabulary.ids(first[0]) == vocabulary.ids(again[0]) != vocabulary.ids(other[0])
        assert vocabulary.ids(first[0]) != vocabulary.ids(first[1])

    def test_prefixes_are_shared_and_nothing_else(self, tokenizer: Tokenizer) -> None:
        vocabulary = Vocabulary(tokenizer)
        items = made(tokenizer, workload="shared-prefix", num_prompts=40, num_prefixes=3, prefix_len=50)
        prompts = [vocabulary.ids(item) for item in items]
        assert len({tuple(ids[:50]) for ids in prompts}) == 3
        assert len({tuple(ids[50:60]) for ids in prompts}) == 40

    def test_chats_have_the_means_that_are_stated(self, tokenizer: Tokenizer) -> None:
        items = made(tokenizer, workload="sharegpt", num_prompts=20_000)
        # Cut at 1,024: a little below 161 and 338.
        assert 135 < statistics.mean(i.prompt_tokens for i in items) < 165
        assert 300 < statistics.mean(i.output_tokens for i in items) < 340
        assert max(i.prompt_tokens for i in items) == 1024

    def test_what_does_not_fit_is_left_out_and_counted(self) -> None:
        items = [Item((PromptPiece("a", n),), n, 4) for n in (5, 10, 15)]
        fitted = fit(items, 14)
        assert (fitted.items, fitted.left_out) == (items[:2], 1)
        with pytest.raises(WorkloadError, match="8 tokens: the shortest has 9"):
            fit(items, 8)


class TestMooncake:
    def write(self, tmp_path: Path, *lines: object) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        return path

    def test_times_lengths_and_shared_blocks(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        path = self.write(tmp_path, *MOONCAKE)
        first, second = made(tokenizer, workload="mooncake", dataset=path)
        assert (first.at, first.prompt_tokens, first.output_tokens) == (0, 1030, 5)
        assert (second.at, second.prompt_tokens, second.output_tokens) == (0.5005, 600, 9)
        vocabulary = Vocabulary(tokenizer)
        one, two = vocabulary.ids(first), vocabulary.ids(second)
        assert (len(one), len(two)) == (1030, 600)
        assert one[:600] == two  # the second block as well, though the prompt ends in the middle of it
        assert one[512:600] != one[:88]

    def test_only_as_many_as_asked_for(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        path = self.write(tmp_path, MOONCAKE[0], "not read any more")
        assert len(made(tokenizer, workload="mooncake", dataset=path, num_prompts=1)) == 1

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "line 2: .*truncated"),
            ({**MOONCAKE[1], "input_length": "many"}, r"line 2: Expected `int`, got `str`.*input_length"),
            ({**MOONCAKE[1], "output_length": 0}, r"line 2: .*>= 1.*output_length"),
            ({**MOONCAKE[1], "hash_ids": [1]}, "line 2: hash_ids has 1 entries"),
            ({**MOONCAKE[1], "timestamp": 1}, "line 2: timestamp 1 is before the first, 1000"),
            ({"timestamp": 2000}, "line 2: .*missing required field `input_length`"),
        ],
    )
    def test_errors_name_the_line(
        self, tmp_path: Path, tokenizer: Tokenizer, line: object, message: str
    ) -> None:
        path = self.write(tmp_path, MOONCAKE[0], line)
        with pytest.raises(WorkloadError, match=f"{path}, {message}"):
            made(tokenizer, workload="mooncake", dataset=path)

    def test_an_empty_trace(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        with pytest.raises(WorkloadError, match="holds no request"):
            made(tokenizer, workload="mooncake", dataset=self.write(tmp_path))


class TestBurstGpt:
    def test_failed_requests_are_passed_over(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        path = tmp_path / "burst.csv"
        path.write_text(BURSTGPT)
        items = made(tokenizer, workload="burstgpt", dataset=path)
        assert [(i.at, i.prompt_tokens, i.output_tokens) for i in items] == [(0, 472, 18), (40.5, 12, 7)]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("Timestamp,Model\n", "line 1: the header has no column 'Request tokens'"),
            (BURSTGPT + "soon,GPT-4,1,1,2,x\n", "line 5: Timestamp is 'soon'"),
            (BURSTGPT + "50,GPT-4,1.5,1,2,x\n", "line 5: Request tokens is '1.5'"),
            (BURSTGPT + "50,GPT-4,1,-1,2,x\n", "line 5: Response tokens is '-1'"),
            (BURSTGPT + "50\n", "line 5: Request tokens is ''"),
            (BURSTGPT + "1,GPT-4,1,1,2,x\n", "line 5: Timestamp 1 is before the first, 5"),
            (BURSTGPT.splitlines()[0] + "\n", "holds no request"),
        ],
    )
    def test_errors_name_the_line(
        self, tmp_path: Path, tokenizer: Tokenizer, text: str, message: str
    ) -> None:
        path = tmp_path / "burst.csv"
        path.write_text(text)
        with pytest.raises(WorkloadError, match=f"{path}.*{message}"):
            made(tokenizer, workload="burstgpt", dataset=path)


class TestShareGpt:
    def write(self, tmp_path: Path, document: object) -> Path:
        path = tmp_path / "chats.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    def chat(self, *turns: str) -> dict[str, object]:
        return {"id": "x", "conversations": [{"from": "human", "value": turn} for turn in turns]}

    def test_first_turn_is_asked_and_the_second_measured(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        prompt, answer = (
            "What does the router do with a prompt?",
            "It tokenizes it and places it.",
        )
        path = self.write(
            tmp_path, [self.chat("alone"), self.chat("hi", "yo"), self.chat(prompt, answer, "more")]
        )
        [item] = made(tokenizer, workload="sharegpt", dataset=path)
        assert item.prompt == prompt
        assert item.prompt_tokens == len(tokenizer.encode(prompt))
        assert item.output_tokens == len(tokenizer.encode(answer, add_special_tokens=False))
        assert Vocabulary(tokenizer).ids(item) == tokenizer.encode(prompt)

    @pytest.mark.parametrize(
        ("document", "message"),
        [
            ("[", "is not JSON"),
            ({}, "Expected `array`"),
            ([{"conversations": [{"value": 3}]}], r"Expected `str`.*\$\[0\].conversations\[0\]"),
            ([{}], r"missing required field `conversations`.*\$\[0\]"),
            ([], "holds no conversation"),
        ],
    )
    def test_errors_name_the_entry(
        self, tmp_path: Path, tokenizer: Tokenizer, document: object, message: str
    ) -> None:
        path = self.write(tmp_path, document)
        with pytest.raises(WorkloadError, match=f"{path}: .*{message}"):
            made(tokenizer, workload="sharegpt", dataset=path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workload": "chat"}, "--workload: must be one of random, shared-prefix"),
        ({"workload": "mooncake"}, "--dataset: --workload mooncake needs"),
        ({"dataset": Path(__file__)}, "--dataset: can only be given with"),
        ({"workload": "burstgpt", "dataset": Path("/nowhere")}, "--dataset: /nowhere is no file"),
        ({"input_len": 0}, "--input-len: must be at least 1, not 0"),
        ({"range_ratio": 1.5}, "--range-ratio: must be from 0 to 1, not 1.5"),
        ({"range_ratio": float("nan")}, "--range-ratio: must be from 0 to 1, not nan"),
        ({"num_prompts": 0}, "--num-prompts: must be at least 1"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkloadConfig(**options)  # type: ignore[arg-type]
