"""Steps of llama.cpp, for ``loadtest.quantized_speed``, which runs this with the peer's own interpreter.

    python -m loadtest.llama_cpp_steps CHECKPOINT FOLDER THREADS

Writes the Qwen2 checkpoint as GGUF of 16 bits into the folder, has llama.cpp quantize that, and says "ready".
Then each line of standard input, a JSON object with ``kind``, ``sequences``, ``input_len`` and
``output_len``, is answered by a line with the seconds of the prompts (``prompts``) and of the median decode
step (``decode``). Imports nothing of Baton.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf  # type: ignore[import-not-found]
import llama_cpp  # type: ignore[import-not-found]
import numpy as np
from numpy.typing import NDArray

KINDS = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}
UBATCH = 512
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Names of a layer's tensors in a checkpoint and in GGUF."""


def tensors_of(path: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The checkpoint's tensors, which are bfloat16, in float32."""
    data = np.memmap(path / "model.safetensors", np.uint8, "r")
    length = int(data[:8].view(np.uint64)[0])
    header = json.loads(bytes(data[8 : 8 + length]))
    for name, found in header.items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in found["data_offsets"])
            bits = np.frombuffer(data[start:end].tobytes(), np.uint16).astype(np.uint32) << 16
            yield name, bits.view(np.float32).reshape(found["shape"])


def gguf_name(name: str) -> str:
    """The name that a tensor of a checkpoint has in GGUF."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    module, end = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[module]}.{end}"


def write_gguf(path: Path, to: Path) -> None:
    """Write the checkpoint as GGUF: matrices in 16 bits, vectors in float32."""
    config = json.loads((path / "config.json").read_text())
    writer = gguf.GGUFWriter(str(to), "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name, tensor in tensors_of(path):
        writer.add_tensor(gguf_name(name), tensor.astype(np.float16) if tensor.ndim > 1 else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Loaded:
    """A model that llama.cpp has loaded."""

    def __init__(self, path: Path, threads: int) -> None:
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        assert self._model, f"{path} cannot be loaded"
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads = threads

    def steps(self, sequences: int, input_len: int, output_len: int) -> Mapping[str, float]:
        """The seconds of the prompts of so many sequences, and of the median step in which all decode."""
        context = self._context(sequences * (input_len + output_len), sequences)
        try:
            rng = random.Random(sequences)
            began = time.perf_counter()
            tokens = [
                self._prompt(context, seq, [rng.randrange(4000) for _ in range(input_len)])
                for seq in range(sequences)
            ]
            prompts, decodes = time.perf_counter() - began, []
            for position in range(input_len, input_len + output_len - 1):
                began = time.perf_counter()
                tokens = self._decode(context, tokens, position)
                decodes.append(time.perf_counter() - began)
        finally:
            llama_cpp.llama_free(context)
        return {"prompts": prompts, "decode": sorted(decodes)[len(decodes) // 2]}

    def _context(self, size: int, sequences: int) -> object:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = size, sequences
        params.n_batch = params.n_ubatch = UBATCH
        params.n_threads = params.n_threads_batch = self._threads
        return llama_cpp.llama_init_from_model(self._model, params)

    def _prompt(self, context: object, sequence: int, tokens: list[int]) -> int:
        rows = [(token, at, sequence, at == len(tokens) - 1) for at, token in enumerate(tokens)]
        return self._run(context, rows)[0]

    def _decode(self, context: object, tokens: list[int], position: int) -> list[int]:
        return self._run(context, [(token, position, seq, True) for seq, token in enumerate(tokens)])

    def _run(self, context: object, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute rows of (token, position, sequence, whether its logits are wanted); the likeliest next
        tokens of those that are."""
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        status = llama_cpp.llama_decode(context, batch)
        assert status == 0, f"llama_decode returned {status}"
        found = [
            int(
                np.ctypeslib.as_array(
                    llama_cpp.llama_get_logits_ith(context, at), (self._vocab_size,)
                ).argmax()
            )
            for at, row in enumerate(rows)
            if row[3]
        ]
        llama_cpp.llama_batch_free(batch)
        return found


def main() -> None:
    path, folder, threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    llama_cpp.llama_backend_init()
    plain = folder / "f16.gguf"
    write_gguf(path, plain)
    loaded = dict[str, Loaded]()
    for name, kind in KINDS.items():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = kind, threads
        to = folder / f"{name}.gguf"
        assert llama_cpp.llama_model_quantize(str(plain).encode(), str(to).encode(), params) == 0
        loaded[name] = Loaded(to, threads)
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(loaded[question.pop("kind")].steps(**question)), flush=True)


if __name__ == "__main__":
    main()
