"""Signatures: closed forms, means over the shape, invariances, parts of shapes, gradients."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import dense_spectrum, sphere

from qattn import MatrixKernel, Spectrum, diffusion, eigsh, shapes
from qattn.signatures import heat_kernel_signature, wave_kernel_signature

pytestmark = pytest.mark.usefixtures("_one_thread")


def circle(n, frequencies):
    """Exact spectrum of n points of the unit circle: 1, √2 cos(lθ), √2 sin(lθ) with frequencies l²."""
    theta = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    columns, mu = [torch.ones(n, dtype=torch.float64)], [0.0]
    for i in range(1, frequencies + 1):
        columns += [2**0.5 * torch.cos(i * theta), 2**0.5 * torch.sin(i * theta)]
        mu += [float(i * i)] * 2
    mu, mass = torch.tensor(mu, dtype=torch.float64), torch.full((n,), 1 / n, dtype=torch.float64)
    return Spectrum(torch.exp(-mu / 200), torch.stack(columns, dim=1), torch.zeros(len(mu)), mass, sigma=0.1)


def creature(n, k, seed=0):
    return dense_spectrum(shapes.creature(n, seed)[0].double(), 0.2, k)


def signatures(spectrum, frequencies=None):
    return {
        "heat": heat_kernel_signature(spectrum, frequencies=frequencies),
        "heat, scaled": heat_kernel_signature(spectrum, scaled=True, frequencies=frequencies),
        "waves": wave_kernel_signature(spectrum, frequencies=frequencies),
    }


def test_heat_on_a_circle_is_the_theta_function():
    times = torch.tensor([0.2, 1.0, 3.0])
    expected = torch.tensor([1 + 2 * sum(math.exp(-t * i * i) for i in range(1, 11)) for t in times.tolist()])
    torch.testing.assert_close(heat_kernel_signature(circle(50, 10), times), expected.double().expand(50, 3))


def test_times_are_those_of_sun():
    spectrum = circle(30, 10)
    times = torch.logspace(math.log10(4 * math.log(10) / 100), math.log10(4 * math.log(10)), 16, dtype=torch.float64)
    torch.testing.assert_close(heat_kernel_signature(spectrum), heat_kernel_signature(spectrum, times))
    assert heat_kernel_signature(spectrum, num_times=5).shape == (30, 5)


def test_waves_are_windows_of_log_energies():
    spectrum = creature(200, 20)
    log_mu = torch.log(spectrum.frequencies[1:])
    energies = torch.linspace(float(log_mu[0]), float(log_mu[-1]), 100, dtype=torch.float64)
    width = 7 * (log_mu[-1] - log_mu[0]) / 100
    windows = torch.exp(-((energies - log_mu[:, None]) ** 2) / (2 * width**2))
    expected = spectrum.vectors[:, 1:].square() @ windows / windows.sum(0)
    torch.testing.assert_close(wave_kernel_signature(spectrum, num_energies=100), expected)
    assert wave_kernel_signature(spectrum).shape == (200, 128)


def test_energies_in_a_gap():
    """Narrow windows all underflow between two frequencies that are far apart."""
    found = wave_kernel_signature(circle(20, 1), num_energies=1000, frequencies=[0.0, 1.0, 1e3])
    assert found.isfinite().all()


def test_means_over_the_shape():
    spectrum = creature(300, 25)
    times = torch.tensor([0.01, 0.1, 1.0], dtype=torch.float64)
    means = spectrum.mass @ heat_kernel_signature(spectrum, times)
    heat_trace = torch.exp(-times * spectrum.frequencies[:, None]).sum(0)
    torch.testing.assert_close(means, heat_trace, rtol=1e-5, atol=0)
    for name in ("heat, scaled", "waves"):
        means = spectrum.mass @ signatures(spectrum)[name]
        torch.testing.assert_close(means, torch.ones_like(means))


def test_signs_and_rotations_change_nothing():
    spectrum = circle(40, 6)
    turned = torch.empty_like(spectrum.vectors)
    turned[:, 0] = -spectrum.vectors[:, 0]
    for i in range(1, 13, 2):  # each eigenspace has two dimensions
        turned[:, i : i + 2] = spectrum.vectors[:, i : i + 2] @ torch.linalg.qr(torch.randn(2, 2).double()).Q
    other = replace(spectrum, vectors=turned)
    for name, signature in signatures(spectrum).items():
        torch.testing.assert_close(signatures(other)[name], signature, msg=name)


def test_motions_and_order_change_nothing():
    points, order = shapes.creature(300)[0].double(), torch.randperm(300)
    moved = points[order] @ torch.linalg.qr(torch.randn(3, 3).double()).Q + torch.randn(3).double()
    before, after = (signatures(dense_spectrum(x, 0.2, 20)) for x in (points, moved))
    for name, signature in before.items():
        torch.testing.assert_close(after[name], signature[order], rtol=1e-6, atol=1e-6, msg=name)


def test_size_enters_by_the_times_alone():
    spectrum = creature(200, 15)
    larger = replace(spectrum, sigma=3 * spectrum.sigma)  # a shape three times as large
    for name, signature in signatures(spectrum).items():
        torch.testing.assert_close(signatures(larger)[name], signature, msg=name)
        torch.testing.assert_close(signatures(spectrum, spectrum.frequencies / 9)[name], signature, msg=name)


def test_shapes_of_several_parts():
    """Zeros, one per part, with either sign because of the error of the operator, do not set the scale."""
    points = torch.cat([shapes.creature(150)[0].double(), sphere(100) + 5, 0.5 * sphere(80) - 5])
    for tol in (1e-3, 1e-6):
        spectrum = dense_spectrum(points, 0.3, 30, tol=tol)
        mu = spectrum.frequencies
        assert (mu[:3].abs() < 1e-2 * mu[3]).all()
        zeroed = torch.cat([torch.zeros(3), mu[3:]])
        for name, signature in signatures(spectrum).items():
            torch.testing.assert_close(signature, signatures(spectrum, zeroed)[name], rtol=1e-2, atol=1e-3, msg=name)
    with pytest.raises(ValueError, match=r"at least 1 above 0 that differ; got 0, .* Compute more eigenpairs"):
        heat_kernel_signature(dense_spectrum(points, 0.3, 3))


def test_gradients():
    spectrum = creature(30, 6)
    mu = spectrum.frequencies
    mu[0] = 0.01  # errors below 0 are cut off

    def call(mu, vectors):
        return tuple(signatures(replace(spectrum, vectors=vectors), mu).values())

    assert torch.autograd.gradcheck(call, (mu.requires_grad_(), spectrum.vectors.requires_grad_()), fast_mode=True)


def test_frequencies_of_operators_without_a_bandwidth_are_asked_for():
    x = sphere(50)
    spectrum = eigsh(diffusion(MatrixKernel(torch.exp(-torch.cdist(x, x)))), 5)
    for signature in (heat_kernel_signature, wave_kernel_signature):
        with pytest.raises(ValueError, match=r"`sigma=None`.*laplacian_eigenvalues\(spectrum.values, sigma\)"):
            signature(spectrum)
        assert signature(spectrum, frequencies=torch.arange(5.0)).isfinite().all()


CIRCLE = circle(10, 2)
MU = torch.tensor([0.0, 1.0, 1.0, 4.0, 4.0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: heat_kernel_signature(CIRCLE, frequencies=MU[:4]), r"`frequencies` .* shape \(5,\).*got \(4,\)"),
        (lambda: heat_kernel_signature(CIRCLE, frequencies=CIRCLE.values), "should ascend.*`laplacian_eigenvalues"),
        (lambda: wave_kernel_signature(CIRCLE, frequencies=MU / 0), "`frequencies` should be finite.*Take fewer"),
        (lambda: heat_kernel_signature(CIRCLE, 1.0), r"`times` should have shape \(T,\).*give `\[t\]`"),
        (lambda: heat_kernel_signature(CIRCLE, [-1.0]), "`times` should not be negative; 1 of its 1"),
        (lambda: heat_kernel_signature(CIRCLE, [math.inf]), "`times` should be finite"),
        (lambda: heat_kernel_signature(CIRCLE, num_times=0), "`num_times` should be an integer of at least 1"),
        (lambda: wave_kernel_signature(CIRCLE, num_energies=0), "`num_energies` should be an integer of at least 1"),
        (lambda: wave_kernel_signature(CIRCLE, frequencies=MU.clamp(max=1)), "at least 2 above 0 that differ; got 1"),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_arrays_in_arrays_out():
    spectrum = dense_spectrum(sphere(80), 0.4, 6)
    for signature in (heat_kernel_signature, wave_kernel_signature):
        made = signature(spectrum.numpy())
        assert isinstance(made, np.ndarray)
        np.testing.assert_array_equal(made, signature(spectrum).numpy())
