"""What a request does not say is as the model's publisher says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton import LLM, SamplingParams, hub
from baton.core.sampling_params import ResolvedSampling
from baton.engine.outputs import RequestOutput
from baton.process.options import StartError
from baton.request.defaults import SamplingDefaults
from baton.router.api.settings import ApiSettings
from tests.support.api_server import serving
from tests.support.scripted_ring import ring_of
from tests.support.tiny_tokenizers import byte_level_tokenizer

QWEN = {"do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "bos_token_id": 1, "new": [{}]}


def written(path: Path, **fields: object) -> Path:
    (path / "generation_config.json").write_text(json.dumps(fields))
    return path


def test_what_a_model_says(tmp_path: Path) -> None:
    assert SamplingDefaults.of(tmp_path, "auto") == SamplingDefaults()
    written(tmp_path, **QWEN)
    assert SamplingDefaults.of(tmp_path, "auto") == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert SamplingDefaults.of(tmp_path, "none") == SamplingDefaults()
    written(tmp_path, min_p=0.1, repetition_penalty=1.05, top_k=-1, top_p=None)
    assert SamplingDefaults.of(tmp_path, "auto") == SamplingDefaults(min_p=0.1, repetition_penalty=1.05)


@pytest.mark.parametrize(
    ("fields", "part"),
    [({"temperature": 3}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_k": 1.5}, "top_k")],
)
def test_what_no_request_could_say_is_refused(tmp_path: Path, fields: dict[str, object], part: str) -> None:
    with pytest.raises(StartError, match=rf"generation_config.json: .*{part}.*--generation-config none"):
        SamplingDefaults.of(written(tmp_path, **fields), "auto")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (0.6, 20, 0.95, 0.1, 1.05)),
        ({"temperature": 0}, (0.0, 20, 0.95, 0.1, 1.05)),
        ({"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}, (0.6, 0, 1.0, 0.0, 1.0)),
        ({"top_k": -1, "temperature": 2}, (2.0, 0, 0.95, 0.1, 1.05)),
        ({"use_beam_search": True, "best_of": 2}, (1.0, 0, 1.0, 0.0, 1.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_request_goes_before_it(
    tmp_path: Path, path: str, fields: dict[str, object], expected: tuple[float, ...]
) -> None:
    tokenizer = byte_level_tokenizer(tmp_path, template="{{ messages[0].content }}")
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05)
    ring = ring_of(tokenizer, "yes")
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, **fields}
    del body["messages" if path == "/v1/completions" else "prompt"]
    settings = ApiSettings(defaults=defaults)
    async with serving(ring, tokenizer, settings) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post(path, json=body)
    assert ring.calls, answer.text
    assert filters(ring.calls[-1].params) == pytest.approx(expected)


def filters(params: ResolvedSampling) -> tuple[float, ...]:
    return params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty


def test_offline_too(tmp_path: Path) -> None:
    for file in hub.resolve_model("demo").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    written(tmp_path, top_k=1)
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 16, "num_threads": 1}
    prompt, drawn = "Once upon a time", SamplingParams(max_tokens=12, seed=1)
    heeding = LLM(str(tmp_path), **options)
    likeliest = heeding.generate(prompt, SamplingParams(max_tokens=12, temperature=0), progress=False)
    assert ids_of(heeding.generate(prompt, drawn, progress=False)) == ids_of(likeliest)
    deaf = LLM(str(tmp_path), generation_config="none", **options)
    assert ids_of(deaf.generate(prompt, drawn, progress=False)) != ids_of(likeliest)


def ids_of(results: list[RequestOutput]) -> list[int]:
    return list(results[0].outputs[0].token_ids)
