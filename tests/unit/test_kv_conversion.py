"""KV that arrives in another type than the pool's: the same as if the receiver had rounded it itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from baton.transport import converted_part
from baton.transport.base import DeviceView, GroupPart
from baton.transport.kv_types import arriving_bytes, convertible_to
from baton.transport.pool_memory import PoolMemory
from baton.worker.main import KVForm
from baton_kernels.attention import AttentionPlan, write_kv
from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.kv_fp8 import FP8, KVConversion, KVScales
from baton_kernels.kv_layout import KVGroup, KVLayout, LayerKV, StateKV, TokenKV
from tests.support.fake_cuda.device import FakeCuda
from tests.support.fp8_steps import ALL_CODES, dequantized, encoded
from tests.support.paged_steps import Case, lay_out

SCALES = {
    layer: KVScales(*torch.tensor(scales).tolist())
    for layer, scales in enumerate([(0.3, 1.7), (1.0, 1.0), (7.1, 0.013)])
}
"""The scales of each layer, in float32 as in checkpoints."""
PLAIN = (torch.bfloat16, torch.float16, torch.float32)


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def moved(source: Tensor, target: Tensor, block_size: int = 16) -> None:
    """Blocks of one pool to the same blocks of another, as a link moves them."""
    blocks = range(len(source) * source.shape[4] // block_size)
    given = PoolMemory(source).part(block_size)
    piece = memoryview(bytearray(len(blocks) * given.form_of([0]).nbytes))
    given.gather(blocks, piece)
    part = PoolMemory(target, kv_scales=SCALES).part(block_size, None, named(source.dtype))
    assert part.form_of([0]) == given.form_of([0])
    part.scatter(blocks, piece)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_become_the_codes_that_the_receivers_kernel_stores(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = Case(6, 2, 64, 16, None, (), ((0, 48), (0, 16)), dtype)
    source, batch = lay_out(case)
    target, expected = (torch.zeros_like(source, dtype=FP8) for _ in range(2))
    step = CpuPlan.build(batch, expected)
    assert step is not None
    own = CpuPlan.build(batch, source)
    assert own is not None
    source.zero_()
    for layer, scales in SCALES.items():
        k, v = (100 * torch.randn(64, 2, 64).to(dtype) for _ in range(2))
        write_kv(source, layer, k, v, AttentionPlan(own))
        write_kv(expected, layer, k, v, AttentionPlan(step), scales)
    moved(source, target)
    assert target.float().abs().max() == 448, "some are beyond the largest code"
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", PLAIN)
def test_codes_become_their_numbers_rounded_once(dtype: torch.dtype) -> None:
    codes = torch.cat((ALL_CODES.view(torch.uint8), ALL_CODES.view(torch.uint8) + 128))
    source = codes.repeat(8 * 3 * 2 * 16 * 2)[: 2 * 4 * 3 * 2 * 16 * 8].view(FP8).view(2, 4, 3, 2, 16, 8)
    target = torch.zeros(source.shape, dtype=dtype)
    moved(source, target, block_size=8)
    for layer, scales in SCALES.items():
        expected = dequantized(source, scales)[:, :, layer].float().to(dtype)
        assert torch.equal(target[:, :, layer], expected)


def test_codes_of_no_number_stay_so() -> None:
    source = torch.full((1, 1, 1, 2, 16, 8), 0x7F, dtype=torch.uint8).view(FP8)
    target = torch.zeros(source.shape)
    moved(source, target)
    assert target.isnan().all()


@pytest.mark.parametrize(("heads", "layers"), [(range(1, 3), range(3)), (range(4), range(1, 3))])
def test_a_part_has_the_scales_of_its_own_layers(heads: range, layers: range) -> None:
    torch.manual_seed(0)
    source, target = torch.randn(3, 4, 3, 2, 16, 8), torch.zeros(3, 4, 3, 2, 16, 8, dtype=FP8)
    taken = PoolMemory(source).part(16, [GroupPart(heads, layers)])
    piece = memoryview(bytearray(2 * taken.form_of([0]).nbytes))
    taken.gather([2, 0], piece)
    part = PoolMemory(target, kv_scales=SCALES).part(16, [GroupPart(heads, layers)], "float32")
    part.scatter([0, 1], piece)
    expected = torch.zeros_like(target)
    cut = slice(heads.start, heads.stop)
    for layer in layers:
        expected[:2, cut, layer] = encoded(source, SCALES[layer])[[2, 0], cut, layer]
    assert torch.equal(target.float(), expected.float())


def test_few_bytes_are_converted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converted_part, "AT_ONCE_BYTES", 3 * 4 * 3 * 2 * 16 * 8 * 4)
    sizes: list[int] = []
    plain = KVConversion.__call__

    def counted(conversion: KVConversion, blocks: Tensor) -> Tensor:
        sizes.append(len(blocks))
        return plain(conversion, blocks)

    monkeypatch.setattr(KVConversion, "__call__", counted)
    source, target = torch.randn(8, 4, 3, 2, 16, 8), torch.zeros(8, 4, 3, 2, 16, 8, dtype=FP8)
    moved(source, target)
    assert sizes == [3, 3, 2]
    for layer, scales in SCALES.items():
        assert torch.equal(target.float()[:, :, layer], encoded(source, scales).float()[:, :, layer])


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda() as fake:
        yield fake


@pytest.mark.parametrize("through", ["host", "device"])
def test_a_pool_on_a_device_converts_there_beside_the_step(cuda: FakeCuda, through: str) -> None:
    source = torch.randn(4, 2, 3, 2, 16, 8)
    target = torch.zeros(4, 2, 3, 2, 16, 8, dtype=FP8).cuda()
    content = source.view(torch.uint8).view(-1)
    landed, step = content.cuda(), torch.zeros(1).cuda()
    torch.cuda.synchronize()
    step.add_(1)
    piece = (
        content.numpy().data if through == "host" else DeviceView(0, landed.data_ptr(), landed.nbytes, landed)
    )
    PoolMemory(target, kv_scales=SCALES).part(16, None, "float32").scatter([1, 0, 3, 2], piece)
    found = cuda.peek(target).float()[[1, 0, 3, 2]]
    for layer, scales in SCALES.items():
        assert torch.equal(found[:, :, layer], encoded(source, scales).float()[:, :, layer])
    assert not cuda.peek(step).item()


def test_what_is_converted_cannot_be_sent_or_found_in_place() -> None:
    part = PoolMemory(torch.zeros(2, 1, 1, 2, 16, 8)).part(16, None, named(FP8))
    assert (part.in_place([0]), part.on_device([0]), part.whole()) == ([], [], None)
    with pytest.raises(ValueError, match=r"wire blocks \[0\]: they were converted"):
        part.gather([0], memoryview(bytearray(part.form_of([0]).nbytes)))
    with pytest.raises(ValueError, match="wire blocks"):
        part.scatter([2], memoryview(bytearray(part.form_of([0]).nbytes)))


def test_types_that_cannot_be_converted_are_refused_by_name() -> None:
    for kept, other in ((torch.bfloat16, "float16"), (FP8, named(FP8)), (torch.float32, "int8")):
        allowed = ", ".join(convertible_to(named(kept)))
        words = rf"arrives_as is '{other}'; allowed for a pool of {named(kept)}: {allowed}"
        with pytest.raises(ValueError, match=words):
            PoolMemory(torch.zeros(1, 1, 1, 2, 16, 8, dtype=kept)).part(16, None, other)
    latents = KVLayout((KVGroup(TokenKV(1, 1, 8), (0,), range(1), 1),), 16, 4, 512)
    with pytest.raises(ValueError, match="none, as it keeps latents"):
        PoolMemory(torch.zeros(2, 128), layout=latents).part(16, None, named(FP8))
    with pytest.raises(ValueError, match="one of them"):
        KVConversion(torch.float32, torch.bfloat16, [KVScales()], torch.device("cpu"))
    with pytest.raises(ValueError, match="arrives_as is 'int8'; allowed"):
        arriving_bytes("int8", 2)
    assert convertible_to("simulated") == ()
    assert [arriving_bytes(named(dtype), 9) for dtype in (*PLAIN, FP8)] == [2, 2, 4, 1]
    assert arriving_bytes("", 2) == 2


def test_a_worker_converts_k_and_v_and_nothing_else() -> None:
    full, latent, state = TokenKV(2, 2, 8), TokenKV(1, 1, 24), StateKV(2, 8)
    codes = ("float8_e4m3fn",)
    for dtype, groups, types in (
        ("bfloat16", (full, state), codes),
        ("float8_e4m3fn", (full,), ("bfloat16", "float16", "float32")),
        ("fp8-dynamic", (full,), ()),
        ("bfloat16", (latent,), ()),
        ("float32", (state,), ()),
    ):
        kept: tuple[LayerKV, ...] = groups
        assert KVForm("any", dtype, 2, kept).convertible == types
