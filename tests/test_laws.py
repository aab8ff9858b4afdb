"""Every kernel, method and CPU backend against its dense float64 matrix: values, transposes, gradients and the rest."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import slow
from laws import KERNELS, QUICK, log_of, operator

from qattn import MatrixKernel, Solver, diffusion

pytestmark = pytest.mark.usefixtures("_one_thread")
SINGLE, DOUBLE = torch.float32, torch.float64


@pytest.fixture(params=[name if name in QUICK else slow(name) for name in KERNELS])
def case(request):
    """A kernel that has the law of the test: `test_extend` is the law "extend"."""
    found = KERNELS[request.param]
    law = request.function.__name__.removeprefix("test_")
    if law in found.lacks:
        pytest.skip(found.lacks[law])
    return found


def tensors_of(case, dtype, requires_grad=False):
    return {
        name: x.to(dtype).clone().requires_grad_(requires_grad and name not in case.fixed)
        for name, x in case.tensors.items()
    }


def masses(case, dtype=DOUBLE):
    return (0.2 + torch.rand(case.size, dtype=DOUBLE)).to(dtype)


def close(found, expected, tol):
    """Compare to `tol` of the largest expected number."""
    assert found.shape == expected.shape
    gap, size = (found.double() - expected).abs().max(), expected.abs().max()
    assert gap <= tol * size, f"{float(gap / size):.1e} > {tol:.1e}"


def made(case, dtype=SINGLE, mass=None, **options):
    options = {"tol": 1e-6 if dtype == SINGLE else 1e-9, "solver": Solver(max_iter=300)} | options
    return diffusion(case.make(**tensors_of(case, dtype)), mass=mass, **options)


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
def test_attend(case, dtype):
    """lse and averages, with biases over five decades and some sites left out."""
    if dtype == DOUBLE and "float64" in case.lacks:
        pytest.skip(case.lacks["float64"])
    bias, value = 4 * torch.randn(case.size, dtype=DOUBLE), torch.randn(case.size, 3, dtype=DOUBLE)
    bias[::7] = -torch.inf
    out, lse = case.make(**tensors_of(case, dtype)).attend(bias.to(dtype), value.to(dtype))
    scores = case.log(**case.tensors) + bias
    close(out, torch.softmax(scores, -1) @ value, 1e-4 if dtype == SINGLE else 1e-6)
    close(lse, torch.logsumexp(scores, -1), 1e-4 if dtype == SINGLE else 1e-6)


@pytest.mark.parametrize("normalization", ["sinkhorn", "row", "symmetric", "none"])
def test_apply(case, normalization):
    """The output, with masses of 0 at some sites, whose signal is NaN."""
    mass, signal = masses(case), torch.randn(case.size, 3, dtype=DOUBLE)
    mass[::5] = 0
    Q = operator(case.log(**case.tensors), mass, normalization)
    given = torch.where(mass[:, None] > 0, signal, torch.nan).float()
    q = made(case, mass=mass.float(), normalization=normalization)
    close(q @ given, Q @ torch.where(mass[:, None] > 0, signal, 0), 2e-4)


def test_transpose(case):
    """Qᵀg, with masses over eight decades: what light points give counts."""
    mass = masses(case) * 10.0 ** (-8 * torch.rand(case.size, dtype=DOUBLE))
    signal = torch.randn(case.size, 2, dtype=DOUBLE)
    q = made(case, mass=mass.float(), tol=3e-7)  # about what rounding leaves
    Q = operator(case.log(**case.tensors), mass)
    close(q.T @ signal.float(), Q.T @ signal, 5e-4)
    small = (mass < mass.median())[:, None] * signal
    close(q.T @ small.float(), Q.T @ small, 5e-4)


def test_extend(case):
    new = torch.randn(40, 3, dtype=DOUBLE)
    mass, signal = masses(case), torch.randn(case.size, 2, dtype=DOUBLE)
    q = made(case, mass=mass.float())
    f = torch.from_numpy(q.potential.double().numpy())
    rows = torch.softmax(case.log_at(new, **case.tensors) + f + log_of(mass), -1)
    close(q.extend(new.float()) @ signal.float(), rows @ signal, 2e-4)


def test_power(case):
    mass, signal = masses(case), torch.randn(case.size, 2, dtype=DOUBLE)
    Q = operator(case.log(**case.tensors), mass)
    close(made(case, mass=mass.float()).power(3, signal.float()), Q @ (Q @ (Q @ signal)), 2e-4)


def test_value_and_gradient(case):
    """∇(Qf) is the derivative of the extension at the points themselves."""
    mass, signal = masses(case), torch.randn(case.size, 2, dtype=DOUBLE)
    points = case.tensors["points"].clone().requires_grad_()
    f = torch.from_numpy(made(case, DOUBLE, mass=mass, tol=1e-10).potential.numpy())
    smooth = torch.softmax(case.log_at(points, **case.tensors) + f + log_of(mass), -1) @ signal
    slopes = torch.stack([torch.autograd.grad(smooth[:, c].sum(), points, retain_graph=True)[0] for c in range(2)], 1)
    value, slope = made(case, mass=mass.float()).value_and_gradient(signal.float() + 30)
    close(value, smooth.detach() + 30, 1e-4)
    close(slope, slopes, 1e-3)
    one, along = made(case, mass=mass.float()).value_and_gradient(signal[:, 0].float())
    close(one, smooth[:, 0].detach(), 1e-4)
    close(along, slopes[:, 0], 1e-3)


def gradients_of(case, dtype, build, signal, mass, weight, mean=0.0, create_graph=True):
    """The tensors, and the gradients by them of a loss of Q(signal + mean) and of Qᵀ signal.

    If no graph is created, engines that can sum all derivatives in one pass do so; else they are attends.
    """
    tensors = tensors_of(case, dtype, requires_grad=True)
    signal, mass = (x.to(dtype).clone().requires_grad_() for x in (signal, mass))
    wanted = [x for x in tensors.values() if x.requires_grad] + [mass, signal]
    q, weight = build(tensors, mass), weight.to(dtype)
    loss = ((q @ (signal + mean)) * weight).sum() + ((q.T @ signal.flip(0)) * weight.flip(0)).sum()
    return wanted, torch.autograd.grad(loss, wanted, create_graph=create_graph)


def dense_operator(case):
    return lambda tensors, mass: operator(case.log(**tensors), mass)


@pytest.mark.parametrize("create_graph", [False, slow(True)], ids=["fused", "composed"])
@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_first_gradients(case, mean, create_graph):
    """Gradients by every tensor, the masses and the signal, in float32, also of signals far from 0."""
    mass, signal, weight = masses(case), *torch.randn(2, case.size, 2, dtype=DOUBLE)

    def build(tensors, mass):
        return diffusion(case.make(**tensors), mass=mass, tol=1e-6, solver=Solver(max_iter=300))

    _, found = gradients_of(case, SINGLE, build, signal, mass, weight, mean, create_graph)
    _, expected = gradients_of(case, DOUBLE, dense_operator(case), signal, mass, weight, mean)
    for grad, right in zip(found, expected, strict=True):
        close(grad, right, 2e-3)


@pytest.mark.slow
def test_second_gradients(case):
    """Derivatives of ⟨gradient, direction⟩ by everything, in float64."""
    mass, signal, weight = masses(case), *torch.randn(2, case.size, 2, dtype=DOUBLE)

    def build(tensors, mass):
        return diffusion(case.make(**tensors), mass=mass, tol=1e-10, solver=Solver(max_iter=300))

    results = []
    for made_by in (build, dense_operator(case)):
        torch.manual_seed(1)
        wanted, first = gradients_of(case, DOUBLE, made_by, signal, mass, weight)
        along = sum((grad * torch.randn_like(grad)).sum() for grad in first)
        results.append(torch.autograd.grad(along, wanted))
    for grad, right in zip(*results, strict=True):
        close(grad, right, 1e-4)


@pytest.mark.parametrize("autocast", [False, slow(True)], ids=["plain", "autocast"])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float16, 5e-3), (torch.bfloat16, 2e-2)], ids=str)
def test_sixteen_bits(case, dtype, tol, autocast):
    """Signals of 16 bits, with and without gradients: results in their dtype, gradients as exact as it allows.

    Under autocast the backward pass is too.
    """
    mass = masses(case)
    signal = (3 + torch.randn(case.size, 2, dtype=DOUBLE)).to(dtype)
    weight = torch.randn(case.size, 2, dtype=DOUBLE)
    tensors = tensors_of(case, DOUBLE, requires_grad=True)
    expected = operator(case.log(**tensors), mass) @ signal.double()
    wanted = [x for x in tensors.values() if x.requires_grad]
    right = torch.autograd.grad((expected * weight).sum(), wanted)
    own = tensors_of(case, SINGLE, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            plain = diffusion(case.make(**own), mass=mass.float(), tol=1e-6, solver=Solver(max_iter=300)) @ signal
        found = diffusion(case.make(**own), mass=mass.float(), tol=1e-6, solver=Solver(max_iter=300)) @ signal
        loss = (found.float() * weight.float()).sum()
        grads = torch.autograd.grad(loss, [x for x in own.values() if x.requires_grad])
    assert plain.dtype == found.dtype == dtype
    close(plain, expected.detach(), tol)
    close(found.detach(), expected.detach(), tol)
    for grad, exact in zip(grads, right, strict=True):
        close(grad, exact, tol)


def test_batches(case):
    """Two clouds, two heads and a batch of signals that the kernel lacks, item by item, also as `q[index]`."""
    tensors = tensors_of(case, SINGLE)
    sigma = torch.tensor([1.0, 1.5]) * tensors["sigma"]
    both = {name: torch.stack([x, x.flip(0)]) for name, x in tensors.items() if name != "sigma"}
    mass, signal = masses(case, SINGLE), torch.randn(5, 1, 1, case.size, 2)
    q = diffusion(case.make(**both, sigma=sigma), mass=torch.stack([mass, mass.flip(0)])[:, None], tol=1e-6)
    found, back = q @ signal, q.T @ signal
    assert found.shape == back.shape == (5, 2, 2, case.size, 2)
    for head in range(2):
        one = diffusion(case.make(**tensors | {"sigma": sigma[head]}), mass=mass, tol=1e-6)
        close(found[:, 0, head], (one @ signal[:, 0, 0]).double(), 1e-4)
        close(back[:, 0, head], (one.T @ signal[:, 0, 0]).double(), 1e-4)
        close(found[:, 1, head].flip(1), (one @ signal[:, 0, 0].flip(1)).double(), 1e-4)
    for index in (1, (slice(None), 0), (slice(1, 2), -1)):
        close(q[index] @ signal[0, 0, 0], found[0][index].double(), 1e-4)


def test_arrays(case):
    """Arrays come back as arrays; strides and booleans do not matter."""
    q = made(case)
    signal = torch.randn(2, case.size).T  # not contiguous
    expected = q @ signal.contiguous()
    torch.testing.assert_close(q @ signal, expected)
    torch.testing.assert_close(torch.from_numpy(q @ signal.numpy()), expected)
    torch.testing.assert_close(q @ (signal > 0), q @ (signal > 0).float())
    torch.testing.assert_close(q @ signal[:, 0], expected[:, 0])


def test_algebra(case):
    """Sums in both orders, and multiples: the entries of the matrices, added and multiplied."""
    kernel = case.make(**tensors_of(case, SINGLE))
    extra = torch.rand(case.size, case.size, dtype=DOUBLE)
    extra = extra + extra.T
    other = MatrixKernel(extra.float())
    mass, signal = masses(case), torch.randn(case.size, 2, dtype=DOUBLE)
    Q = operator(torch.logaddexp(case.log(**case.tensors), torch.log(3 * extra)), mass)
    for whole in (kernel + 3 * other, 3 * other + kernel):
        close(diffusion(whole, mass=mass.float(), tol=1e-6) @ signal.float(), Q @ signal, 1e-4)


def test_copies(case):
    """Pickled, copied and in another dtype it is the same operator."""
    q, signal = made(case), torch.randn(case.size, 2)
    expected = q @ signal
    for other in (pickle.loads(pickle.dumps(q)), copy.deepcopy(q), pickle.loads(pickle.dumps(q.kernel))):
        again = other if hasattr(other, "T") else diffusion(other, tol=1e-6, solver=Solver(max_iter=300))
        torch.testing.assert_close(again @ signal, expected, rtol=1e-4, atol=1e-5)
    double = q.to(torch.float64) @ signal.double()
    assert double.dtype == torch.float64
    close(double.float(), expected.double(), 1e-4)


def test_two_threads(case):
    """Two at once do not disturb one another."""
    q, signals = made(case), [torch.randn(case.size, 2) for _ in range(2)]
    expected = [q @ signal for signal in signals]
    fresh = made(case)  # nothing prepared yet
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda signal: fresh @ signal, signals))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_error(case):
    """`error` returns at least a tenth of the true error of all rows from a few of them."""
    kernel = case.make(**tensors_of(case, SINGLE))
    bias = 4 * torch.randn(case.size, dtype=DOUBLE)
    found = kernel.attend(bias.float()).lse.double()
    truth = float(torch.expm1(found - torch.logsumexp(case.log(**case.tensors) + bias, -1)).abs().max())
    assert float(kernel.error(bias.float(), num_rows=30)) >= 0.1 * truth or truth < 1e-6


@pytest.mark.parametrize("normalization", ["sinkhorn", "row", "symmetric", "none"])
def test_spectrum(case, normalization):
    """Positivity, constants, self-adjointness, mass, and a spectrum in [0, 1], of those that promise it."""
    q = made(case, DOUBLE if "float64" not in case.lacks else SINGLE, normalization=normalization)
    dense, mass = q.to_dense().double(), q.mass.double().expand(case.size)
    tol = 1e-6 if "float64" not in case.lacks else 1e-4
    assert dense.amin() > -tol * dense.amax()
    if normalization in ("sinkhorn", "row"):
        close(dense.sum(-1), torch.ones(case.size, dtype=DOUBLE), tol)
    if normalization != "row":
        weighted = mass[:, None] * dense
        close(weighted, weighted.T, tol)
    if normalization == "sinkhorn":
        close(mass @ dense, mass, tol)
        root = mass.sqrt()
        values = torch.linalg.eigvalsh(root[:, None] * dense / root)
        assert values[0] > -10 * tol
        assert values[-1] < 1 + 10 * tol


def test_masses(case):
    """A kernel's own masses have sum 1, and are equal unless it comes with others; those that are given take over."""
    kernel = case.make(**tensors_of(case, SINGLE))
    mass = diffusion(kernel, tol=1e-2).mass.expand(case.size)
    weights = case.tensors.get("weights")
    expected = torch.full((case.size,), 1 / case.size, dtype=DOUBLE) if weights is None else weights[weights > 0]
    close(mass, expected / expected.sum(), 1e-6)
    given = masses(case, SINGLE)
    torch.testing.assert_close(diffusion(kernel, mass=given, tol=1e-2).mass.float(), given)
