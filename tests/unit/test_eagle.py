"""The EAGLE layer against transformers, and its drafter against plain recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import LlamaConfig, LlamaModel

from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.loader import load_model
from baton.speculation.eagle import WINDOW, EagleDrafter, EagleLayer, causal, load_eagle
from baton.speculation.kv_ring import NONE, KvRing
from tests.support.heads import save_eagle
from tests.support.sequences import Tokens
from tests.support.tiny_models import TINY_MODELS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS["llama"](tmp_path_factory.mktemp("eagle") / "model")


@pytest.fixture(scope="module")
def target(target_dir: Path) -> CausalLM:
    return load_model(target_dir)


@pytest.fixture(scope="module")
def eagle_dir(target_dir: Path) -> Path:
    return save_eagle(target_dir.parent / "eagle", target_dir)


@pytest.fixture(scope="module")
def loaded(eagle_dir: Path, target: CausalLM) -> tuple[EagleLayer, ModelConfig]:
    return load_eagle(eagle_dir, target, CPU)


class Oracle:
    """The layer in transformers: a Llama of one layer behind a plain projection."""

    def __init__(self, eagle_dir: Path, target: CausalLM) -> None:
        stored = load_file(eagle_dir / "model.safetensors")
        self.fuse = stored.pop("fuse.weight")
        self.norms = [stored.pop("embedding_norm.weight"), stored.pop("hidden_norm.weight")]
        weights = {"norm.weight": stored.pop("norm.weight"), "embed_tokens.weight": torch.zeros(320, 64)}
        q, k, v = torch.split(stored.pop("qkv_proj.weight"), [64, 32, 32])
        gate, up = torch.split(stored.pop("mlp.gate_up_proj.weight"), [80, 80])
        parts = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v}
        parts |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "self_attn.o_proj": stored.pop("o_proj.weight")}
        weights |= {f"layers.0.{name}.weight": part for name, part in parts.items()}
        weights |= {f"layers.0.{name}": part for name, part in stored.items()}
        self.model = LlamaModel(LlamaConfig.from_pretrained(eagle_dir))
        self.model.load_state_dict(weights)
        self.target = target

    @torch.inference_mode()
    def predict(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """The tokens after the rows [n] and the rows' hidden states [n, H] -> predicted ones [n, H]."""
        given = zip((self.target.embed(token_ids), hidden), self.norms, strict=True)
        x = torch.cat([rms_norm(part, (64,), norm, 1e-5) for part, norm in given], dim=-1) @ self.fuse.T
        predicted: Tensor = self.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return predicted

    def draft(self, tokens: list[int], hidden: Tensor, count: int, first: int = 0) -> list[int]:
        """Drafts of a sequence whose hidden states from token ``first`` on are known. Everything is computed
        again for every token."""
        after = tokens[first + 1 :]
        for _ in range(count):
            predicted = self.predict(torch.tensor(after), hidden)[-1:]
            hidden = torch.cat((hidden, predicted))
            after.append(int(self.target.logits(predicted).argmax()))
        return after[-count:]


@pytest.fixture(scope="module")
def oracle(eagle_dir: Path, target: CausalLM) -> Oracle:
    return Oracle(eagle_dir, target)


def states(rows: int, salt: int = 0) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(salt))


def drafter(
    loaded: tuple[EagleLayer, ModelConfig], target: CausalLM, capacity: int = 4, window: int = WINDOW
) -> EagleDrafter:
    return EagleDrafter(*loaded, target, capacity, window)


def positions_in(eagle: EagleDrafter) -> list[int]:
    return sorted(eagle.ring.positions[eagle.ring.positions != NONE].tolist())


def test_the_layer_is_a_llama_layer(
    loaded: tuple[EagleLayer, ModelConfig], target: CausalLM, oracle: Oracle
) -> None:
    tokens, hidden = torch.arange(40, 52), states(12)
    with torch.inference_mode():
        out = loaded[0](target.embed(tokens)[None], hidden[None], torch.arange(12)[None], causal)[0]
    torch.testing.assert_close(out, oracle.predict(tokens, hidden), atol=1e-4, rtol=1e-4)


class TestDrafter:
    def test_drafts_as_if_all_were_computed_again(
        self, loaded: tuple[EagleLayer, ModelConfig], target: CausalLM, oracle: Oracle
    ) -> None:
        """Two sequences of different pace, whose drafts are refused and accepted in part."""
        eagle = drafter(loaded, target)
        seqs, hidden = [Tokens(8), Tokens(20, salt=1)], [states(60), states(60, salt=1)]
        known = [0, 0]
        for kept in ((7, 19), (1, 3), (2, 1), (4, 2), (1, 1)):
            for at, seq in enumerate(seqs):
                if known[at]:
                    seq.token_ids.extend([(known[at] * 13 + i) % 256 for i in range(kept[at])])
                eagle.observe(seq, known[at], hidden[at][known[at] : known[at] + kept[at]])
                known[at] += kept[at]
            wanted = [
                oracle.draft(seq.token_ids.tolist(), hidden[at][: known[at]], 4)
                for at, seq in enumerate(seqs)
            ]
            assert eagle.draft(seqs, [4, 4]) == wanted
            assert eagle.draft(seqs[::-1], [2, 4]) == [wanted[1][:2], wanted[0]], (
                "asked again, another answer"
            )

    def test_takes_a_prompt_in_parts_and_again_after_a_preemption(
        self, loaded: tuple[EagleLayer, ModelConfig], target: CausalLM, oracle: Oracle
    ) -> None:
        eagle, seq, hidden = drafter(loaded, target), Tokens(30), states(29)
        for first, stop in ((0, 10), (10, 16), (0, 7), (7, 20), (20, 29)):
            eagle.observe(seq, first, hidden[first:stop])
            assert bool(eagle.draft([seq], [3])[0]) == (stop == 29)
        assert eagle.draft([seq], [3]) == [oracle.draft(seq.token_ids.tolist(), hidden, 3)]
        assert positions_in(eagle) == [*range(31)]

    def test_computes_what_is_kept_once(
        self, loaded: tuple[EagleLayer, ModelConfig], target: CausalLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """But for the last row, which the next draft begins with again."""
        rows: list[int] = []
        forward = loaded[0].forward

        def counted(embedded: Tensor, *rest: Any) -> Tensor:
            rows.append(embedded.shape[1])
            return forward(embedded, *rest)

        monkeypatch.setattr(loaded[0], "forward", counted)
        eagle, seq = drafter(loaded, target), Tokens(20)
        eagle.observe(seq, 0, states(19))
        eagle.draft([seq], [3])
        seq.token_ids.extend([1, 2])
        eagle.observe(seq, 19, states(2))
        eagle.draft([seq], [3])
        assert rows == [19, 1, 1, 3, 1, 1]

    def test_begins_in_the_middle(
        self, loaded: tuple[EagleLayer, ModelConfig], target: CausalLM, oracle: Oracle
    ) -> None:
        """A handoff brings KV, not hidden states: rotary positions are relative, so what is missing is as if
        the sequence had begun later."""
        eagle, seq, hidden = drafter(loaded, target), Tokens(30), states(29)
        assert eagle.draft([seq], [3]) == [[]]
        eagle.observe(seq, 25, hidden[25:])
        assert eagle.draft([seq], [3]) == [oracle.draft(seq.token_ids.tolist(), hidden[25:], 3, first=25)]

    def test_leaves_out_what_it_missed(
        self, loaded: tuple[EagleLayer, ModelConfig], target: CausalLM
    ) -> None:
        """Refused drafts that lie in the gap must not be taken for tokens."""
        eagle, seq, hidden = drafter(loaded, target), Tokens(12), states(40)
        eagle.observe(seq, 0, hidden[:11])
        eagle.draft([seq], [4])
        seq.token_ids.extend(range(18))
        eagle.observe(seq, 11, hidden[11:13])  # not asked about after that
        eagle.observe(seq, 20, hidden[20:29])
        first = eagle.draft([seq], [4])
        other = drafter(loaded, target)
        other.observe(other_seq := Tokens(12), 0, hidden[:11])
        other.draft([other_seq], [1])  # leaves no drafts behind
        other_seq.token_ids = seq.token_ids
        other.observe(other_seq, 20, hidden[20:29])
        assert first == other.draft([other_seq], [4])
        assert positions_in(eagle) == [*range(10), *range(20, 32)]

    def test_sees_no_further_back_than_its_window(
        self, loaded: tuple[EagleLayer, ModelConfig], target: CausalLM, oracle: Oracle
    ) -> None:
        eagle, seq, hidden = drafter(loaded, target, window=16), Tokens(60), states(59)
        eagle.observe(seq, 0, hidden)
        [short] = eagle.draft([seq], [1])
        # The first rows of the window saw what came before neither here nor there.
        assert short == oracle.draft(seq.token_ids.tolist(), hidden[43:], 1, first=43)
        assert len(eagle.draft([seq], [5])[0]) == 5

    def test_keeps_no_more_than_its_capacity(
        self, loaded: tuple[EagleLayer, ModelConfig], target: CausalLM
    ) -> None:
        eagle = drafter(loaded, target, capacity=2)
        seqs = [Tokens(4, salt=i) for i in range(3)]
        for seq in seqs:
            eagle.observe(seq, 0, states(3))
        assert [len(draft) for draft in eagle.draft(seqs, [2, 2, 2])] == [0, 2, 2]
        eagle.forget(seqs[2])
        eagle.forget(seqs[2])
        assert [len(draft) for draft in eagle.draft(seqs, [2, 2, 2])] == [0, 2, 0]
        eagle.forget(seqs[1])
        assert eagle.num_sequences == 0
        # A slot that was somebody's is as good as new.
        again = Tokens(4)
        eagle.observe(again, 0, states(3))
        fresh = drafter(loaded, target)
        fresh.observe(again, 0, states(3))
        assert eagle.draft([again], [4]) == fresh.draft([again], [4])


class TestLoading:
    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ({"hidden_size": 128}, r"config\.json: hidden_size is 128; allowed: 64, the model's"),
            ({"vocab_size": 4096}, r"config\.json: vocab_size is 4096; allowed: 320, the model's"),
            ({"num_hidden_layers": 2}, "num_hidden_layers is 2; allowed: 1"),
            ({"attention_bias": True}, "attention_bias is true; allowed: false"),
            (
                {"num_key_value_heads": 4},
                r"tensor qkv_proj\.weight has shape \[128, 64\]; expected \[192, 64\]",
            ),
            ({"speculative_method": "medusa"}, 'speculative_method is "medusa"; allowed: "eagle"'),
            ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "plain rotary positions"),
        ],
    )
    def test_refuses_what_does_not_fit(
        self, tmp_path: Path, target_dir: Path, target: CausalLM, overrides: dict[str, object], message: str
    ) -> None:
        path = save_eagle(tmp_path / "eagle", target_dir, **overrides)
        with pytest.raises(ValueError, match=message):
            load_eagle(path, target, CPU)


def test_the_ring_keeps_what_was_written_last() -> None:
    ring = KvRing(2, kv_heads=1, window=4, head_dim=2, dtype=torch.float32, device=CPU)
    k = torch.arange(12.0).view(1, 1, 6, 2)
    ring.write(torch.tensor([1]), torch.tensor([[0, 1, 2, 3]]), k[:, :, :4], k[:, :, :4])
    ring.write(torch.tensor([1]), torch.tensor([[4, 5]]), k[:, :, 4:], k[:, :, 4:])
    assert ring.positions.tolist() == [[-1] * 4, [4, 5, 2, 3]]
    out = ring.attend(torch.tensor([1]), torch.tensor([[3]]), torch.zeros(1, 1, 1, 2))
    assert out.flatten().tolist() == [5.0, 6.0], "the mean of positions 2 and 3: later ones are out of sight"
    ring.drop_from(1, 5)
    assert ring.positions[1].tolist() == [4, -1, 2, 3]
