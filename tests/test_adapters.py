"""The adapters of FlashAttention and xFormers against functions with the published signatures.

Each stand-in computes attention from the 16-bit or float32 tensors it is given, accumulating in float32 as the kernels
do, and returns what the package documents. Keywords that a package does not have would raise here.
"""

import types

import pytest
import torch
from cases import dense

from qattn.attention import flash_attn, xformers
from qattn.attention.dispatch import BACKENDS
from qattn.attention.gradient import differentiable
from qattn.attention.inputs import Inputs


def attention(query, key, value, scale):
    """(B, N, heads, E) tensors to out of the same layout and dtype, and lse (B, heads, N)."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert query.dtype == key.dtype == value.dtype
    q, k, v = (x.float().transpose(1, 2) for x in (query, key, value))
    scores = scale * q @ k.mT
    return (scores.softmax(-1) @ v).transpose(1, 2).to(query.dtype), scores.logsumexp(-1)


def fa2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    out, lse = attention(q, k, v, softmax_scale)
    return (out, lse, torch.empty(0)) if return_attn_probs else out


def fa3(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False):  # fmt: skip
    out, lse = attention(q, k, v, softmax_scale)
    return (out, lse) if return_attn_probs else out


def fa4(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
        learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
        score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None,
        block_sparse_tensors_bwd=None, return_lse=False):  # fmt: skip
    out, lse = attention(q, k, v, softmax_scale)
    return out, lse if return_lse else None


def memory_efficient_attention_forward_requires_grad(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    out, lse = attention(query, key, value, scale)
    return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)


def memory_efficient_attention_backward(
    grad, output, lse, query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None
):
    """The formulas of the kernel: p = exp(s − lse), s̄ = p (⟨grad, v⟩ − ⟨grad, output⟩)."""
    assert lse.shape[-1] % 32 == 0
    g, o, q, k, v = (x.transpose(1, 2) for x in (grad, output, query, key, value))
    weights = torch.exp(scale * q @ k.mT - lse[..., : q.shape[2], None])
    cotangents = weights * (g @ v.mT - (g * o).sum(-1, keepdim=True))
    return tuple(x.transpose(1, 2) for x in (scale * cotangents @ k, scale * cotangents.mT @ q, weights.mT @ g))


def problem(points_dtype, value_dtype):
    query, key = 3 * torch.randn(2, 50, 3), 3 * torch.randn(2, 70, 3)
    value = None if value_dtype is None else torch.randn(2, 70, 5).to(value_dtype)
    bias = torch.randn(2, 70)
    bias[:, ::5] = -torch.inf
    points = query.to(points_dtype), key.to(points_dtype)
    return Inputs(*points, value, bias)


def check(attended, inputs, tolerance):
    expected_out, expected_lse = dense(inputs.query, inputs.key, inputs.value, inputs.bias)
    torch.testing.assert_close(attended.lse.double(), expected_lse, rtol=0, atol=1e-4)
    if inputs.value is None:
        assert attended.out is None
    else:
        assert attended.out.dtype == inputs.value.dtype
        torch.testing.assert_close(attended.out.double(), expected_out, rtol=0, atol=3 * tolerance[inputs.value.dtype])


DTYPES = [
    (torch.float32, None),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
]


@pytest.mark.parametrize(("points", "values"), DTYPES)
@pytest.mark.parametrize(
    ("package", "function"), list(zip(flash_attn.PACKAGES, [fa4, fa3, fa2], strict=True)), ids=["FA4", "FA3", "FA2"]
)
def test_flash_attn_adapter(package, function, points, values):
    inputs = problem(points, values)
    check(flash_attn.attend_with(package, function, inputs), inputs, flash_attn.FlashAttn.tolerance)


FMHA = types.SimpleNamespace(
    memory_efficient_attention_forward_requires_grad=memory_efficient_attention_forward_requires_grad
)


@pytest.mark.parametrize(("points", "values"), [*DTYPES, (torch.float32, torch.float32)])
def test_xformers_adapter(points, values):
    inputs = problem(points, values)
    check(xformers.attend_with(FMHA, inputs), inputs, xformers.Xformers.tolerance)


@pytest.mark.parametrize("values", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sigma", [None, 6.0])
def test_gradients_of_xformers(monkeypatch, values, sigma):
    """One call of the backward of its kernel gives the gradients by query, key, value, bias and σ."""
    calls = []

    def counted(*args, **options):
        calls.append(None)
        return memory_efficient_attention_backward(*args, **options)

    fmha = types.SimpleNamespace(
        memory_efficient_attention_forward_requires_grad=memory_efficient_attention_forward_requires_grad,
        memory_efficient_attention_backward=counted,
    )
    backend = xformers.Xformers()
    monkeypatch.setattr(xformers, "_load", lambda: fmha)
    monkeypatch.setattr(xformers.Xformers, "not_supported_reasons", lambda self, inputs: [])
    given = problem(torch.float32, values)
    weight = torch.randn(2, 50, 5, dtype=torch.float64)

    def gradients(engine, dtype):
        bandwidth = None if sigma is None else torch.full((2,), sigma)
        tensors = given.query, given.key, given.value, given.bias, bandwidth
        tensors = [None if x is None else x.to(dtype).requires_grad_() for x in tensors]
        kept = None if values is None or dtype == torch.float64 else tensors[2].to(values)
        query, key, value, bias, width = (*tensors[:2], tensors[2] if kept is None else kept, *tensors[3:])
        out, lse = differentiable(engine, Inputs(query, key, value, bias, width))
        loss = lse.sin().sum() + (0 if out is None else (out * weight.to(out.dtype)).sum())
        return torch.autograd.grad(loss, [x for x in tensors if x is not None])

    expected = gradients(BACKENDS["reference"], torch.float64)
    for grad, right in zip(gradients(backend, torch.float32), expected, strict=True):
        error = (grad.double() - right)[right.isfinite()].norm() / right[right.isfinite()].norm()
        assert error < (1e-5 if values != torch.bfloat16 else 2e-2)
    assert len(calls) == 1


@pytest.fixture
def modules(monkeypatch):
    """Pretended packages: a module by name, or the error that importing it raises."""
    present = {}

    def module(name):
        if isinstance(present[name], Exception):
            raise present[name]
        return present[name]

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in {n.split(".")[0] for n in present} or None)
    monkeypatch.setattr("importlib.import_module", module)
    for function in (flash_attn._load, xformers._load):
        function.cache_clear()
    yield present
    monkeypatch.undo()
    for function in (flash_attn._load, xformers._load):
        function.cache_clear()


def test_only_packages_that_import_count(modules):
    """flash-attn 2.8.3 ships a folder `cute` that needs more packages to import: FA2 must serve all the same."""
    modules["flash_attn"] = types.SimpleNamespace(flash_attn_func=fa2)
    modules["flash_attn.cute"] = ModuleNotFoundError("No module named 'cuda'")
    assert [package.module for package in flash_attn.installed()] == ["flash_attn"]


def test_a_broken_package_is_a_reason_not_a_crash(modules):
    modules["flash_attn"] = modules["flash_attn.cute"] = ImportError("undefined symbol: c10")
    modules["xformers.ops.fmha"] = OSError("libcudart.so.13: cannot open shared object file")
    inputs = problem(torch.float32, None)
    assert flash_attn.FlashAttn().not_supported_reasons(inputs)[0] == (
        "flash_attn is installed, but does not import (ImportError: undefined symbol: c10)"
    )
    assert xformers.Xformers().not_supported_reasons(inputs)[0] == (
        "xformers.ops.fmha is installed, but does not import (OSError: libcudart.so.13: cannot open shared object file)"
    )


def test_a_broken_mslk_does_not_hide_xformers(modules):
    modules["mslk.attention.fmha"] = ImportError("libcudart.so.13: cannot open shared object file")
    modules["xformers.ops.fmha"] = FMHA
    inputs = problem(torch.float32, torch.float32)
    check(xformers.Xformers().attend(inputs), inputs, xformers.Xformers.tolerance)


def test_mslk_goes_before_xformers(modules):
    modules["xformers.ops.fmha"] = types.ModuleType("an old one, which cannot attend")
    modules["mslk.attention.fmha"] = FMHA
    inputs = problem(torch.float32, torch.float32)
    check(xformers.Xformers().attend(inputs), inputs, xformers.Xformers.tolerance)


def test_the_chosen_package_fits_the_gpu(modules, monkeypatch):
    """FA4 is newest, but only FA2 and FA3 take wide values, and FA3 only on Hopper."""
    called = []

    def module(name):
        def function(q, k, v, softmax_scale, return_lse=False, return_attn_probs=False):
            called.append(name)
            return attention(q, k, v, softmax_scale)

        return types.SimpleNamespace(flash_attn_func=function)

    for package in flash_attn.PACKAGES:
        modules[package.module] = module(package.module)
    for capability, channels in (((9, 0), 4), ((8, 0), 4), ((12, 0), 4), ((9, 0), 200), ((8, 0), 200)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, c=capability: c)
        inputs = problem(torch.float32, None)
        value = torch.randn(2, 70, channels).half()
        flash_attn.FlashAttn().attend(Inputs(inputs.query, inputs.key, value))
    assert called == [*3 * ["flash_attn.cute"], "flash_attn_interface", "flash_attn"]
