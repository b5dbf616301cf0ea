"""Medusa heads: what they compute, what they refuse to load, and what the drafter keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.models.base import CausalLM
from baton.models.loader import load_model
from baton.process.options import ModelError
from baton.speculation.medusa import MedusaDrafter, MedusaHeads, load_medusa
from tests.support.heads import save_medusa
from tests.support.sequences import Tokens
from tests.support.tiny_models import TINY_MODELS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS["llama"](tmp_path_factory.mktemp("medusa") / "model")


@pytest.fixture(scope="module")
def target(target_dir: Path) -> CausalLM:
    return load_model(target_dir)


@pytest.fixture(scope="module")
def heads_dir(target_dir: Path) -> Path:
    return save_medusa(target_dir.parent / "heads", target_dir, layers=2)


@pytest.fixture(scope="module")
def heads(heads_dir: Path, target: CausalLM) -> MedusaHeads:
    return load_medusa(heads_dir, target, CPU)


def hidden_states(rows: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(salt))


class TestHeads:
    def test_compute_what_their_files_say(self, heads: MedusaHeads, heads_dir: Path) -> None:
        stored = load_file(heads_dir / "model.safetensors")
        hidden = hidden_states(5)
        out = heads(hidden)
        assert out.shape == (5, 3, 64)
        for head in range(3):
            x = hidden.double()
            for block in range(2):
                name = f"heads.{head}.blocks.{block}.linear"
                inner = x @ stored[f"{name}.weight"].double().T + stored[f"{name}.bias"].double()
                x = x + inner * torch.sigmoid(inner)
            x = x @ stored[f"heads.{head}.out.weight"].double().T
            torch.testing.assert_close(out[:, head].double(), x, atol=1e-4, rtol=1e-4)

    def test_compute_no_more_than_is_asked(self, heads: MedusaHeads) -> None:
        hidden = hidden_states(2)
        assert torch.equal(heads(hidden, 2), heads(hidden)[:, :2])


class TestLoading:
    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ({"hidden_size": 128}, r"config\.json: hidden_size is 128; allowed: 64, the model's"),
            ({"vocab_size": 4096}, r"config\.json: vocab_size is 4096; allowed: 320, the model's"),
            ({"medusa_num_heads": 0}, "medusa_num_heads is 0; allowed: a whole number of at least 1"),
            ({"medusa_num_heads": 4}, r"tensor heads\.3\..* is missing"),
            ({"medusa_num_heads": 2}, r"medusa has no place for tensor heads\.2\."),
            ({"speculative_method": "eagle"}, 'speculative_method is "eagle"; allowed: "medusa"'),
            ({"speculative_method": None}, "speculative_method is missing"),
        ],
    )
    def test_refuses_what_does_not_fit(
        self, tmp_path: Path, target_dir: Path, target: CausalLM, overrides: dict[str, object], message: str
    ) -> None:
        path = save_medusa(tmp_path / "heads", target_dir, **overrides)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            load_medusa(path, target, CPU)

    def test_refuses_other_shapes_and_types(self, tmp_path: Path, target_dir: Path, target: CausalLM) -> None:
        path = save_medusa(tmp_path / "heads", target_dir)
        good = load_file(path / "model.safetensors")
        name = "heads.1.out.weight"
        for bad, message in ((torch.zeros(64, 63), r"shape \[64, 63\]"), (good[name].long(), "is int64")):
            save_file({**good, name: bad}, path / "model.safetensors")
            with pytest.raises(ModelError, match=f"tensor {name} .*{message}"):
                load_medusa(path, target, CPU)

    def test_refuses_a_pickle_a_torso_and_nothing(
        self, tmp_path: Path, target_dir: Path, target: CausalLM
    ) -> None:
        with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
            load_medusa(tmp_path, target, CPU)
        path = save_medusa(tmp_path / "heads", target_dir)
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-10])
        with pytest.raises(ModelError, match="truncated or corrupt"):
            load_medusa(path, target, CPU)
        weights.rename(path / "heads.pt")
        with pytest.raises(ModelError, match=r"pickled \(heads\.pt\)"):
            load_medusa(path, target, CPU)


class TestDrafter:
    def test_drafts_the_likeliest_token_of_each_head(self, heads: MedusaHeads, target: CausalLM) -> None:
        drafter = MedusaDrafter(heads, target, capacity=4)
        one, other, new = Tokens(9), Tokens(5), Tokens(7)
        rows = hidden_states(3)
        drafter.observe(one, 5, rows)
        drafter.observe(other, 3, rows[:1])
        wanted = [target.logits(heads(row)[0]).argmax(-1).tolist() for row in (rows[2:], rows[:1])]
        assert drafter.draft([new, one, other], [3, 2, 9]) == [[], wanted[0][:2], wanted[1]]
        assert drafter.draft([other, one], [1, 3]) == [wanted[1][:1], wanted[0]]

    def test_drafts_nothing_from_a_state_that_is_not_the_latest(
        self, heads: MedusaHeads, target: CausalLM
    ) -> None:
        drafter = MedusaDrafter(heads, target, capacity=4)
        seq = Tokens(9)
        drafter.observe(seq, 0, hidden_states(7))  # a part of a prompt, or before a preemption
        assert drafter.draft([seq], [3]) == [[]]
        drafter.observe(seq, 7, hidden_states(1))
        assert len(drafter.draft([seq], [3])[0]) == 3

    def test_keeps_no_more_than_its_capacity(self, heads: MedusaHeads, target: CausalLM) -> None:
        drafter = MedusaDrafter(heads, target, capacity=2)
        seqs = [Tokens(4) for _ in range(3)]
        for seq in seqs:
            drafter.observe(seq, 0, hidden_states(3))
        assert [len(draft) for draft in drafter.draft(seqs, [2, 2, 2])] == [0, 2, 2]
        drafter.forget(seqs[2])
        drafter.forget(seqs[2])
        assert [len(draft) for draft in drafter.draft(seqs, [2, 2, 2])] == [0, 2, 0]
        drafter.forget(seqs[1])
        assert drafter.num_sequences == 0
