"""The Triton kernels on logits against float64 and against the sampler in plain torch, under triton's
interpreter."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.sampling import sampler
from baton.engine.sampling.logits import (
    LogitRules,
    PackedRules,
    Row,
    adjust,
    adjust_by_kernels,
    allowed_words,
)
from baton.engine.sampling.philox import exponentials
from baton.engine.sampling.sampler import choose, choose_by_kernel, packed, sample
from baton_kernels import rows as entry
from tests.support.deep import all_deep_but
from tests.support.sampling_cases import Rows, adjusted

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs them on the device", allow_module_level=True)

from loadtest.draw_passes import passes
from tests.support.interpreted import logits as kernels
from tests.support.interpreted import sampling, times_of

PLAIN = ResolvedSampling(max_tokens=1)


def drawn(rows: Rows) -> list[int]:
    tokens: list[int] = sampling.draw(rows.logits.clone(), *rows.packed).tolist()
    return tokens


class TestDraw:
    @pytest.mark.parametrize("vocab", all_deep_but(2, [7, 320, 4096, 9001]))
    def test_is_the_reference(self, vocab: int) -> None:
        rows = Rows.random(vocab, 24, vocab)
        expected = rows.expected()
        tokens = drawn(rows)
        sure = [at for at, token in enumerate(expected) if token is not None]
        assert len(sure) > 17
        assert [tokens[at] for at in sure] == [expected[at] for at in sure]
        plain = sample(rows.logits, rows.params, rows.positions)
        assert [tokens[at] for at in sure] == [plain[at] for at in sure]

    def test_has_the_buckets_of_the_reference(self) -> None:
        assert sampling.BUCKET == sampler.BUCKET

    def test_random_numbers_are_those_of_the_reference(self) -> None:
        """To the precision of float32, the small ones too, which win."""
        for seed, position in ((3, 0), (-5, 2**33 + 1)):
            times = exponentials([seed], [position], 8192)[0]
            out = torch.empty(8192)
            times_of[(1,)](out, torch.tensor([seed]), torch.tensor([position]), 8192)
            np.testing.assert_allclose(out.double().numpy(), times, rtol=1e-6)

    def test_does_not_change_with_the_batch(self) -> None:
        rows = Rows.random(1, 12, 500)
        together = drawn(rows)
        for at in range(12):
            alone = Rows(rows.logits[at : at + 1], rows.params[at : at + 1], rows.positions[at : at + 1])
            assert drawn(alone) == together[at : at + 1]

    @pytest.mark.deep
    def test_of_equal_tokens_at_the_edge_of_top_k_top_p_counts_as_many_as_make_k(self) -> None:
        logits = torch.tensor([[math.log(4.0), *[0.0] * 6]]).expand(8, -1)
        rows = Rows(logits, [replace(PLAIN, top_k=2, top_p=0.75, seed=5)] * 8, list(range(8)))
        assert drawn(rows) == [0] * 8
        wider = Rows(logits, [replace(PLAIN, top_k=2, top_p=0.85, seed=5)] * 8, list(range(8)))
        assert len(set(drawn(wider))) > 2

    @pytest.mark.deep
    @pytest.mark.parametrize("shape", all_deep_but(1, ["smooth", "rounded", "flat"]))
    def test_is_the_same_whether_the_edge_is_in_registers_or_not(
        self, shape: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With few columns almost every filter has its edge below what the columns keep."""
        vocab = 400
        choices = [
            {"shape": shape, "spread": 0.3, "temperature": 1.0, "min_p": min_p, "position": 3}
            | {"top_k": top_k, "top_p": top_p}
            for top_k in (0, 7, 150, vocab)
            for top_p, min_p in ((0.9, 0.0), (0.99999, 0.0), (1.0, 0.02))
        ]
        rows = Rows.of(choices, vocab, seed=11)
        wide = drawn(rows)
        monkeypatch.setattr(sampling, "COLUMNS", 16)
        assert drawn(rows) == wide
        plain = sample(rows.logits, rows.params, rows.positions)
        sure = [at for at, token in enumerate(rows.expected()) if token is not None]
        assert [wide[at] for at in sure] == [plain[at] for at in sure]
        assert len(sure) > 4

    @pytest.mark.deep
    def test_goes_over_a_row_three_times_where_the_filters_leave_few(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        row = torch.randn(4096, generator=torch.Generator().manual_seed(2)) * 3
        row[:60] += 20  # in neighbouring columns, as frequent tokens are
        for filters in ({"top_k": 20}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.95}, {"min_p": 0.1}):
            assert 3 <= passes(row, filters) < 3.1
        assert 1 <= passes(row, {"temperature": 0.0}) < 1.1
        monkeypatch.setattr(sampling, "COLUMNS", 8)
        assert passes(row, {"top_k": 40, "top_p": 0.9}) > 10

    def test_rows_that_begin_anywhere_must_have_such_a_stride(self) -> None:
        with pytest.raises(ValueError, match="must begin at a multiple of 16 bytes"):
            sampling.draw(torch.zeros(2, 44)[:, 1:], *packed([PLAIN] * 2, [0, 0], torch.device("cpu")))
        odd = torch.full((3, 43), -1.0)
        odd[1:, 21] = 3.0
        params = [replace(PLAIN, temperature=0.0)] * 2
        assert sampling.draw(odd[1:], *packed(params, [0, 0], odd.device)).tolist() == [21, 21]

    def test_rows_apart_and_with_nothing_to_choose(self) -> None:
        wide = torch.full((3, 100), -math.inf)
        logits = wide[:, :40]
        logits[1, 33] = -5.0
        params = [PLAIN, replace(PLAIN, top_p=0.5), replace(PLAIN, temperature=0.0)]
        tokens = sampling.draw(logits, *packed(params, [0, 0, 0], logits.device)).tolist()
        assert tokens == [0, 33, 0]

    def test_too_large_a_vocabulary_is_an_error(self) -> None:
        logits = torch.empty(1, sampling.LARGEST_VOCAB + 1)
        with pytest.raises(ValueError, match="a vocabulary of 262145 tokens: at most 262144"):
            sampling.draw(logits, *packed([PLAIN], [0], logits.device))


class TestMasks:
    @pytest.mark.parametrize("vocab", [5, 64, 4100])
    def test_bar_what_they_do_not_allow(self, vocab: int) -> None:
        rng = np.random.default_rng(vocab)
        chosen = torch.tensor([4, 0, 2])
        allowed = [np.flatnonzero(rng.random(vocab) < 0.3) for _ in chosen]
        words = torch.from_numpy(np.stack([allowed_words(ids, vocab) for ids in allowed]))
        logits = torch.randn(6, vocab + 3)[:, :vocab]
        expected = logits.clone()
        for row, ids in zip(chosen.tolist(), allowed, strict=True):
            barred = np.setdiff1d(np.arange(vocab), ids)
            expected[row, barred] = -math.inf
        for function in (kernels.bar_tokens, entry.bar_tokens):
            out = torch.zeros(6, vocab + 3)[:, :vocab].copy_(logits)
            function(out, chosen, words)
            assert torch.equal(out, expected)

    def test_of_all_rows_in_any_order(self) -> None:
        words = torch.tensor([[1], [2], [4]], dtype=torch.int32)
        for order in ([0, 1, 2], [2, 0, 1]):
            out = torch.zeros(3, 3)
            entry.bar_tokens(out, torch.tensor(order), words)
            assert [int(out[row].argmax()) for row in order] == [0, 1, 2]

    def test_that_are_too_short_are_refused(self) -> None:
        with pytest.raises(ValueError, match="masks of 32 tokens for logits of 33"):
            entry.bar_tokens(torch.zeros(1, 33), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32))


class TestTheEngine:
    def test_adjusts_by_kernels_as_it_does_without(self) -> None:
        rng = random.Random(4)
        logits = 3 * torch.randn(6, 200, generator=torch.Generator().manual_seed(4))

        def rows() -> list[Row]:
            rng.seed(4)
            found = []
            for at in (4, 1, 3):
                params = replace(random_rules(rng, 200), stop_token_ids=frozenset({3, 9}), min_tokens=at)
                if at != 1:
                    params = replace(params, allowed_token_ids=tuple(rng.sample(range(200), 50)))
                tokens = [rng.randrange(200) for _ in range(40)]
                rules = LogitRules(params, tokens[:38], frozenset({0}))
                found.append(Row(at, rules, tokens, num_drafts=1))
            return found

        by_kernels, without = logits.clone(), logits.clone()
        adjust_by_kernels(by_kernels, rows())
        adjust(without, rows())
        assert torch.equal(by_kernels, without)
        assert not torch.equal(without, logits)

    def test_chooses_by_a_kernel_as_it_does_without(self) -> None:
        rows = Rows.random(9, 10, 300)
        chosen = choose_by_kernel(rows.logits.clone(), rows.params, rows.positions)
        expected = choose(rows.logits, rows.params, rows.positions)
        sure = [at for at, token in enumerate(rows.expected()) if token is not None]
        assert torch.equal(chosen[sure], expected[sure])


def random_rules(rng: random.Random, vocab: int) -> ResolvedSampling:
    ids = rng.sample(range(vocab), 6)
    return replace(
        PLAIN,
        bad_word_ids=tuple((token,) for token in ids[: rng.randrange(3)]),
        logit_bias=tuple((token, rng.uniform(-100, 100)) for token in ids[1 : rng.randrange(2, 6)]),
        repetition_penalty=rng.choice([1.0, 0.5, 1.3]),
        presence_penalty=rng.choice([0.0, 1.5, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.25, -2.0]),
    )


class TestAdjust:
    @pytest.mark.parametrize("seed", all_deep_but(2, range(6)))
    def test_is_the_reference(self, seed: int) -> None:
        rng = random.Random(seed)
        vocab = rng.choice([8, 300])
        logits = 5 * torch.randn(7, vocab, generator=torch.Generator().manual_seed(seed))
        expected: Tensor = logits.double()
        rules: list[Row] = []
        for at in rng.sample(range(7), 5):
            params = random_rules(rng, vocab)
            prompt = [rng.randrange(vocab) for _ in range(rng.choice([1, 200]))]
            outputs = [rng.randrange(vocab) for _ in range(rng.choice([0, 5, 300]))]
            rules.append(Row(at, LogitRules(params, prompt, frozenset({0})), prompt + outputs))
            expected[at] = adjusted(logits[at], params, prompt, outputs)
        out = logits.clone()
        kernels.adjust(out, *PackedRules.of(rules, out.device))
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
        plain = logits.clone()
        adjust(plain, rules)
        assert torch.equal(out, plain)
