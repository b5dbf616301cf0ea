"""Single steps of a whole model, without an engine around them, as shares of the device's best."""

from __future__ import annotations

from loadtest.gpu.bench import Bench, Roof
from loadtest.gpu.model import PARAMS, Loaded

DECODE, PROMPT, MIXED = "Decode step", "Prompt", "Mixed step"


def measure(bench: Bench, which: str) -> None:
    """Measure decode steps, or prompts and mixed steps."""
    roof = bench.roof()
    best = {"copy, GB/s": roof.bytes_per_s / 1e9, "matmul, TF/s": roof.flops / 1e12}
    bench.results.row("The device at best", **best)
    loaded = Loaded.load(bench, graphs=which == "decode")
    if which == "decode":
        decode(bench, loaded, roof)
    else:
        prompts(bench, loaded, roof)
        mixed(bench, loaded)


def decode(bench: Bench, loaded: Loaded, roof: Roof) -> None:
    bench.results.note(
        DECODE,
        "Forward pass, logits and the choice of a token for each row. The bytes are those of the weights but "
        "the embedding, and of the keys and values; the share is the replayed step's. Where sequences share "
        "blocks the pool is smaller than all of theirs, and far larger than the cache.",
    )
    for context in bench.scale.contexts:
        for rows in bench.scale.batches:
            moved = loaded.weight_bytes + rows * context * loaded.kv_token_bytes
            for sampling in PARAMS:
                replayed = bench.seconds(loaded.decode(rows, context, sampling))
                eager = bench.seconds(loaded.decode(rows, context, sampling, replayed=False))
                times = {"replayed, ms": replayed * 1e3, "eager, ms": eager * 1e3}
                rate = moved / replayed
                shares = {"GB/s": rate / 1e9, "of a copy": rate / roof.bytes_per_s}
                bench.results.row(DECODE, rows=rows, context=context, sampling=sampling, **times, **shares)


def prompts(bench: Bench, loaded: Loaded, roof: Roof) -> None:
    config = loaded.config
    head = config.vocab_size * config.hidden_size
    matrices = loaded.weight_bytes // bench.dtype.itemsize - head
    for tokens in bench.scale.prompts:
        taken = bench.seconds(loaded.prompt(tokens))
        pairs = tokens * (tokens + 1) // 2
        attention = 4 * pairs * config.num_heads * config.head_dim * config.num_layers
        rate = (2 * tokens * matrices + attention + 2 * head) / taken
        shares = {"TF/s": rate / 1e12, "of a matmul": rate / roof.flops}
        speed = {"ms": taken * 1e3, "tokens/s": tokens / taken}
        bench.results.row(PROMPT, tokens=tokens, **speed, **shares)


def mixed(bench: Bench, loaded: Loaded) -> None:
    bench.results.note(MIXED, "Rows that decode, with a chunk of a new prompt behind them, in one step.")
    context = bench.scale.contexts[0]
    for rows, chunk in bench.scale.mixed:
        taken = bench.seconds(loaded.mixed(rows, context, chunk))
        alone = bench.seconds(loaded.decode(rows, context, "greedy", replayed=False))
        times = {"ms": taken * 1e3, "decode alone, eager, ms": alone * 1e3}
        bench.results.row(MIXED, rows=rows, context=context, chunk=chunk, **times)
