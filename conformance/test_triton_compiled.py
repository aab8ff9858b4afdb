"""The kernels of the `triton` backend, compiled ahead of time for GPUs that are not there.

Nothing spills, each pair costs one exp2 or a polynomial, and not more registers or instructions than when this was
written.
"""

import pytest
import torch
from conftest import Held
from machine_code import spilled_on_amd
from own_kernels import TYPES, build, launches

from qattn.attention.triton import AMD

CAPABILITIES = (80, 90)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("name", "dims", "channels", "registers", "instructions"),
    [
        ("sum_blocks", 1, 1, 80, 6.3),
        ("sum_blocks", 2, 1, 104, 8.3),
        ("sum_blocks", 3, 1, 128, 10.1),
        ("sum_blocks", 8, 1, 240, 21.5),
        ("sum_lifted_blocks", 3, 1, 128, 6.9),
        ("sum_lifted_blocks", 7, 1, 216, 7.1),
        ("attend_blocks", 3, 3, 176, 20.5),
        ("attend_blocks", 3, 16, 208, 23.5),
        ("attend_blocks", 3, 64, 248, 29.5),
        ("attend_lifted_blocks", 3, 8, 96, 12.1),
        ("attend_lifted_blocks", 3, 64, 128, 14.2),
        ("attend_lifted_blocks", 7, 16, 136, 14.5),
        ("sum_values", 3, 8, 184, 21.0),
        ("differentiate_blocks", 3, 8, 176, 25.5),
        ("differentiate_blocks", 8, 15, 255, 41.0),
    ],
)
def test_machine_code(capability, name, dims, channels, registers, instructions, held: Held) -> None:
    kernel, pairs = build(name, capability, dims, channels)
    path, evidence = f"triton: {name}, D = {dims}, C = {channels}", f"compiled, sm_{capability}"
    held("triton: all kernels, bytes spilled", evidence, kernel.stack, 0)
    held(f"{path}: registers", evidence, kernel.registers, registers)
    main, *again = kernel.weights  # the second one, if there is one, is for rows whose sums underflow
    assert len(again) == (name not in ("sum_values", "differentiate_blocks"))
    is_lse_lifted = name == "sum_lifted_blocks"
    assert main.counts["MUFU.EX2"] == (3 * pairs // 4 if is_lse_lifted else pairs)  # the others are polynomials
    for loop in again:
        assert loop.counts["MUFU.EX2"] == (pairs // 2 if "lifted" in name else pairs)  # of half as many keys
    held(f"{path}: instructions a pair", evidence, len(main.body) / pairs, instructions)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_lists_cost_little(capability) -> None:
    without, with_lists = (build("sum_blocks", capability, 3, 1, listed=listed) for listed in (False, True))
    assert len(with_lists[0].weights[0].body) - len(without[0].weights[0].body) <= 1.5 * without[1]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_16_bit_values_cost_a_product_less(capability) -> None:
    wide, narrow = (
        build("attend_blocks", capability, 3, 64, dtype=dtype)[0].weights[0] for dtype in (torch.float32, torch.float16)
    )
    assert len(narrow.body) < len(wide.body)
    if capability == 80:
        assert 3 * narrow.counts["HMMA"] == 2 * wide.counts["HMMA"]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_code_does_not_grow_with_channels(capability) -> None:
    """A loop over chunks of channels, which is none if there is one chunk."""
    few, many = (build("differentiate_blocks", capability, 3, channels)[0] for channels in (31, 255))
    assert many.ptx == few.ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dims", "channels"), [(4, 16), (4, 40), (6, 20), (8, 16), (9, 16), (12, 16), (16, 16), (3, 255), (8, 255)]
)
def test_nothing_spills(capability, dims, channels, held: Held) -> None:
    """No kernel spills, in any dimension and with any number of channels; derivatives take one channel more."""
    for name in ("sum_blocks", "attend_blocks", "sum_values", "differentiate_blocks"):
        kernel, _ = build(name, capability, dims, channels, listed=True)
        held("triton: all kernels, bytes spilled", f"compiled, sm_{capability}", kernel.stack, 0)


@pytest.mark.parametrize("name", AMD)
@pytest.mark.parametrize(("dims", "channels", "listed"), [(3, 8, False), (3, 32, True), (8, 16, True), (16, 16, True)])
def test_gpus_of_amd(name, dims, channels, listed, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels compile for those that the backend takes, and nothing spills."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for kernel, constants, warps in launches(dims, channels, listed=listed).values():
        spilled = spilled_on_amd(kernel, TYPES, constants, name, warps)
        held("triton: all kernels, registers spilled", f"compiled, {name}", spilled, 0)
