"""The kernels of the `triton` backend, compiled ahead of time for GPUs that are not there.

Nothing spills, each pair costs one exp2, and not more registers or instructions than when this was written.
"""

import pytest
import torch
from conftest import Held
from own_kernels import build

CAPABILITIES = (80, 90)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("name", "dims", "channels", "registers", "instructions"),
    [
        ("sum_blocks", 1, 1, 80, 6.3),
        ("sum_blocks", 2, 1, 104, 8.3),
        ("sum_blocks", 3, 1, 128, 10.1),
        ("sum_blocks", 8, 1, 240, 21.5),
        ("sum_lifted_blocks", 3, 1, 128, 3.7),
        ("sum_lifted_blocks", 7, 1, 240, 4.5),
        ("attend_blocks", 3, 3, 176, 20.5),
        ("attend_blocks", 3, 16, 208, 23.5),
        ("attend_blocks", 3, 64, 248, 29.5),
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
    assert len(again) == (name in ("sum_blocks", "sum_lifted_blocks", "attend_blocks"))
    assert main.counts["MUFU.EX2"] == pairs
    for loop in again:
        assert loop.counts["MUFU.EX2"] == (pairs // 2 if name == "sum_lifted_blocks" else pairs)  # of half as many keys
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
@pytest.mark.parametrize(("dims", "channels"), [(4, 16), (4, 40), (6, 20), (8, 16)])
def test_nothing_spills(capability, dims, channels, held: Held) -> None:
    """For up to 8 dimensions."""
    for name in ("sum_blocks", "attend_blocks", "sum_values", "differentiate_blocks"):
        kernel, _ = build(name, capability, dims, channels, listed=True)
        held("triton: all kernels, bytes spilled", f"compiled, sm_{capability}", kernel.stack, 0)
