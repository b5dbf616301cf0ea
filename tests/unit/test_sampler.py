"""Sampling: the generator against its published vectors, filters against a plain reference, frequencies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.sampling.philox import exponentials, philox4x32
from baton.engine.sampling.sampler import BUCKET, PARTED, SORTED, filter_thresholds, sample


def params(**kwargs: float | int) -> ResolvedSampling:
    return ResolvedSampling(max_tokens=1, **kwargs)  # type: ignore[arg-type]


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


class TestPhilox:
    @pytest.mark.parametrize(
        ("counter", "key", "expected"),
        [
            # Known answers of the Random123 distribution, the authors' own.
            ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
            ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
            (
                [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
                [0xA4093822, 0x299F31D0],
                [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
            ),
        ],
    )
    def test_known_answers(self, counter: list[int], key: list[int], expected: list[int]) -> None:
        # Two columns: the second must not disturb the first.
        columns = np.array([counter, [1, 2, 3, 4]], dtype=np.uint64).T
        keys = np.array([key, [5, 6]], dtype=np.uint64).T
        assert philox4x32(columns, keys)[:, 0].tolist() == expected

    def test_exponentials_are_those_of_the_words(self) -> None:
        """Four of a counter, one counter after the other, under the seed."""
        seed, position = 0x299F31D0A4093822, 0x243F6A8885A308D3
        counters = [[position & 0xFFFFFFFF, position >> 32, at, 0] for at in range(3)]
        key = [[seed & 0xFFFFFFFF, seed >> 32]] * 3
        words = philox4x32(np.array(counters, np.uint64).T, np.array(key, np.uint64).T).T.ravel()
        expected = [-math.log(1 - (int(word) + 0.5) / 2**32) for word in words]
        np.testing.assert_allclose(exponentials([seed], [position], 11)[0], expected[:11], rtol=1e-9)

    def test_exponentials_are_in_range_and_take_any_seed(self) -> None:
        drawn = exponentials([0, 1, 2**64 - 1, -1, 2**64], [0, 1, 2, 2, 0], 6)
        assert drawn.dtype == np.float64
        assert ((drawn >= 2**-33) & (drawn < 23)).all()
        assert (drawn[2] == drawn[3]).all()
        assert (drawn[0] == drawn[4]).all()
        assert len(np.unique(drawn)) == 18

    def test_exponentials_are_those_of_their_row_and_index(self) -> None:
        seeds, positions = [4, 5, 4], [0, 2**40, 1]
        together = exponentials(seeds, positions, 11)
        for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
            for count in (1, 4, 7, 11):
                assert (exponentials([seed], [position], count)[0] == together[row, :count]).all()

    def test_exponentials_are_exponentially_distributed(self) -> None:
        n = 20_000
        by_position = exponentials([7] * n, list(range(n)), 4)[:, 3]
        by_seed = exponentials(list(range(n)), [3] * n, 5)[:, 4]
        by_index = exponentials([7], [3], n)[0]
        for drawn in (by_position, by_seed, by_index):
            counts = np.histogram(np.exp(-drawn), bins=100, range=(0, 1))[0]
            assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 160  # 99 degrees: p < 1e-4
            assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03


class TestGreedy:
    def test_is_the_argmax(self) -> None:
        logits = random_logits(5, 50)
        assert sample(logits, [params(temperature=0.0)] * 5, range(5)) == logits.argmax(-1).tolist()

    def test_beside_drawn_rows(self) -> None:
        logits = random_logits(3, 50)
        drawn, greedy = params(seed=4), params(temperature=0.0)
        mixed = sample(logits, [drawn, greedy, drawn], [0, 1, 2])
        assert mixed[1] == int(logits[1].argmax())
        assert [mixed[0], mixed[2]] == sample(logits[[0, 2]], [drawn, drawn], [0, 2])


class TestDrawing:
    def test_frequencies_follow_the_distribution(self) -> None:
        n, vocab = 30_000, 12
        logits = random_logits(1, vocab, seed=3)
        temperature = 1.7
        tokens = sample(logits.expand(n, -1), [params(seed=11, temperature=temperature)] * n, range(n))
        expected = torch.softmax(logits[0].double() / temperature, -1).numpy() * n
        counts = np.bincount(tokens, minlength=vocab)
        assert ((counts - expected) ** 2 / expected).sum() < 38  # 11 degrees: p < 1e-4

    @pytest.mark.parametrize("shape", ["flat", "peaked in one bucket", "uneven"])
    def test_frequencies_follow_the_distribution_over_many_buckets(self, shape: str) -> None:
        n, vocab = 20_000, 2 * BUCKET + 5
        logits = torch.zeros(1, vocab)
        if shape == "uneven":
            logits = random_logits(1, vocab, seed=8) / 3
        elif shape == "peaked in one bucket":
            logits[0, BUCKET : BUCKET + 4] = 4.0
        tokens = sample(logits.expand(n, -1), [params(seed=12)] * n, range(n))
        expected = torch.softmax(logits[0].double(), -1).numpy() * n
        counts = np.bincount(tokens, minlength=vocab)
        assert ((counts - expected) ** 2 / expected).sum() < 355  # 260 degrees: p < 1e-4

    def test_rounding_of_the_logits_makes_hardly_any_other_token(self) -> None:
        """The inverse of a flat cumulative distribution would be another token for a third of these draws."""
        n, vocab = 1000, 20_000
        logits = random_logits(1, vocab) / 10
        tilted = logits + 1e-4 * torch.linspace(-1, 1, vocab)
        fractions = torch.arange(n) / n
        first, second = (row.double().softmax(-1)[0].cumsum(0) for row in (logits, tilted))
        inverted = torch.searchsorted(first, fractions) != torch.searchsorted(second, fractions)
        assert inverted.sum() > n / 4

        drawn = [params(seed=seed) for seed in range(100)]
        different = 0
        for at in range(0, n, 100):
            positions = range(at, at + 100)
            one, other = (sample(row.expand(100, -1), drawn, positions) for row in (logits, tilted))
            different += sum(left != right for left, right in zip(one, other, strict=True))
        assert different <= 3

    def test_is_the_same_alone_and_in_any_batch(self) -> None:
        rows, vocab = 24, 300
        logits = random_logits(rows, vocab)
        kinds: list[dict[str, float | int]] = [
            {"temperature": 0.0},
            {"temperature": 0.8},
            {"top_k": 5},
            {"top_p": 0.7},
            {"min_p": 0.1},
            {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.4},
        ]
        all_params = [params(**{"seed": 100 + row, **kinds[row % len(kinds)]}) for row in range(rows)]
        positions = [row * 7 for row in range(rows)]
        together = sample(logits, all_params, positions)
        order = [int(i) for i in torch.randperm(rows, generator=torch.Generator().manual_seed(1))]
        shuffled = sample(logits[order], [all_params[i] for i in order], [positions[i] for i in order])
        assert shuffled == [together[i] for i in order]
        for row in range(rows):
            assert sample(logits[row : row + 1], [all_params[row]], [positions[row]]) == [together[row]]

    def test_depends_on_seed_and_position(self) -> None:
        logits = torch.zeros(64, 1000)
        by_position = sample(logits, [params(seed=5)] * 64, range(64))
        by_seed = sample(logits, [params(seed=s) for s in range(64)], [0] * 64)
        assert len(set(by_position)) > 50
        assert len(set(by_seed)) > 50
        assert sample(logits, [params(seed=5)] * 64, range(64)) == by_position

    def test_never_draws_an_impossible_token(self) -> None:
        n = 2000
        logits = torch.full((n, 6), -math.inf)
        logits[:, 2] = 1.0
        logits[:, 4] = 0.0
        assert set(sample(logits, [params(seed=s) for s in range(n)], [0] * n)) == {2, 4}

    def test_reaches_rare_tokens_of_a_large_vocabulary(self) -> None:
        logits = torch.full((1, 100_000), -17.0)
        logits[0, 0] = 0.0
        n = 400
        tokens = sample(logits.expand(n, -1), [params(seed=2)] * n, range(n))
        tail = 100_000 * math.exp(-17.0)
        assert sum(t > 0 for t in tokens) / n == pytest.approx(tail / (1 + tail), abs=0.02)


def plain_filter(logits: list[float], p: ResolvedSampling) -> dict[int, float]:
    """Token → probability, the obvious way, for logits without ties."""
    scaled = {token: value / p.temperature for token, value in enumerate(logits)}
    ranked = sorted(scaled, key=lambda token: -scaled[token])
    if p.top_k:
        ranked = ranked[: p.top_k]
    weights = {token: math.exp(scaled[token] - scaled[ranked[0]]) for token in ranked}
    mass = 0.0
    kept: list[int] = []
    for token in ranked:
        if kept and mass >= p.top_p * sum(weights.values()):
            break
        kept.append(token)
        mass += weights[token]
    kept = [token for token in kept if weights[token] >= p.min_p]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


class TestFilters:
    @pytest.mark.parametrize(
        "chosen",
        [
            params(top_k=1),
            params(top_k=4, seed=1),
            params(top_k=500, seed=1),
            params(top_p=0.0, seed=2),
            params(top_p=0.35, seed=2),
            params(top_p=0.9, temperature=2.5, seed=3),
            params(min_p=0.05, seed=4),
            params(min_p=1.0, seed=4),
            params(top_k=6, top_p=0.8, temperature=1.5, seed=5),
            params(top_k=9, top_p=0.95, min_p=0.1, temperature=0.7, seed=6),
        ],
        ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
    )
    def test_draw_as_the_plain_reference_does(self, chosen: ResolvedSampling) -> None:
        vocab, n = 40, 4000
        logits = random_logits(1, vocab, seed=9)
        expected = plain_filter(logits[0].tolist(), chosen)
        tokens = sample(logits.expand(n, -1), [chosen] * n, range(n))
        assert set(tokens) <= set(expected)
        counts = np.bincount(tokens, minlength=vocab)
        for token, probability in expected.items():
            spread = math.sqrt(n * probability * (1 - probability))
            assert abs(counts[token] - n * probability) <= 4.5 * spread + 1

    def test_equal_logits_stay_or_go_together(self) -> None:
        n = 500
        logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]]).expand(n, -1)
        assert set(sample(logits, [params(top_k=2, seed=1)] * n, range(n))) == {0, 1, 2}


@pytest.mark.parametrize("top_k", [SORTED - 1, SORTED, 900])
@pytest.mark.parametrize("top_p", [1.0, 0.97])
def test_sorting_all_leaves_what_selecting_leaves(top_k: int, top_p: float) -> None:
    scaled = torch.randn(5, 1000, generator=torch.Generator().manual_seed(top_k))
    scaled[1, :700] = -math.inf
    scaled[2] = scaled[2].round()
    told = filter_thresholds(scaled, [ResolvedSampling(max_tokens=1, top_k=top_k, top_p=top_p)] * 5)
    assert told is not None
    for row, threshold in zip(scaled, told, strict=True):
        kept = row.sort(descending=True).values[:top_k].double()
        weights = (kept - kept[0]).exp()
        before = weights.cumsum(0) - weights
        inside = kept[before < top_p * weights.sum()] if top_p < 1 else kept
        assert threshold.item() == pytest.approx(inside[-1].item(), abs=1e-6)


def test_a_wide_top_k_leaves_the_greatest_of_each_row() -> None:
    """Rows of different widths, and rows without a filter, are in one batch."""
    widths = [0, 1, PARTED - 1, PARTED, 300, 511, 300, 0]
    scaled = random_logits(len(widths), 512)
    told = filter_thresholds(scaled, [params(top_k=width) for width in widths])
    assert told is not None
    ordered = scaled.sort(descending=True).values
    for row, width in enumerate(widths):
        assert float(told[row]) == (float(ordered[row, width - 1]) if width else -math.inf)
