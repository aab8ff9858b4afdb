"""How far are gradients of a diffusion from those of a dense float64 one, in every dtype, method and position?

Points of the unit sphere with uneven masses. Gradients by points, σ, masses and signal of a random linear loss, for
signals of 32 and 16 bits with means of 0 and 100 standard deviations; with and without padding far away; at the origin
and far from it. Errors are relative to the norm of the gradient; cotangents are representable in the dtype of the
signal, as autograd would round them. Bounds: 1e-3 in float32, 5e-3 in float16, 2e-2 in bfloat16.
"""

import argparse
import itertools
import sys

import torch
from _measure import parsed, save

import qattn
from qattn.kernels.gaussian.fourier import FourierError

BOUNDS = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
WAYS = (("exact", "native"), ("exact", "sdpa"), ("exact", "reference"), ("tiles", "native"), ("fourier", "auto"))
NAMES = ("points", "sigma", "mass", "signal")


def dense_gradients(points, sigma, mass, signal, weight):
    """Compute gradients of Σ weight · Qf in float64, through the last of many plain Sinkhorn steps."""
    tensors = [x.detach().double().requires_grad_() for x in (points, sigma, mass, signal)]
    x, s, m, f = tensors
    scores = -((x[:, None] - x) ** 2).sum(-1) / (2 * s**2)
    log_mass = torch.where(m > 0, torch.log(torch.where(m > 0, m, 1)), -torch.inf)
    potential = torch.zeros(len(x), dtype=torch.float64)
    for step in range(100):
        with torch.set_grad_enabled(step >= 60):
            potential = 0.5 * (potential - torch.logsumexp(scores + potential + log_mass, -1))
    Q = torch.exp(scores + potential[:, None] + potential + log_mass)
    return torch.autograd.grad(((Q @ f) * weight.double()).sum(), tensors)


def our_gradients(points, sigma, mass, signal, weight, method, backend):
    tensors = [x.detach().clone().requires_grad_() for x in (points, sigma, mass, signal)]
    q = qattn.diffusion(*tensors[:3], tol=1e-6, solver=qattn.Solver(max_iter=100), method=method, backend=backend)
    return torch.autograd.grad(((q @ tensors[3]) * weight.to(signal.dtype)).sum(dtype=torch.float32), tensors)


def problem(n, offset, padding, mean, dtype):
    generator = torch.Generator().manual_seed(0)
    sphere = torch.nn.functional.normalize(torch.randn(n, 3, generator=generator), dim=-1)
    points, mass = sphere + offset, 0.5 + torch.rand(n, generator=generator)
    signal, weight = torch.sin(4 * sphere[:, :2]) + mean, torch.cos(5 * sphere[:, 1:])
    if padding:
        extra = n // 10
        points = torch.cat([points, points[:extra] + padding])
        mass = torch.cat([mass, torch.zeros(extra)])
        signal, weight = (torch.cat([x, torch.zeros(extra, 2)]) for x in (signal, weight))
    return points, mass, signal.to(dtype), weight.to(dtype).float()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=400)
    parser.add_argument("--sigmas", type=float, nargs="+", default=[1.0, 0.3, 0.1, 0.04])
    options = parsed(parser, points=150, sigmas=[0.3, 0.1])
    print(f"{__doc__.splitlines()[0]}\n")
    print(
        f"{'dtype':>9} {'σ':>5} {'offset':>7} {'padding':>8} {'mean':>5}  {'by':<17}"
        + "".join(f"{x:>9}" for x in NAMES)
    )
    rows, bad = [], 0
    places = itertools.product(BOUNDS, options.sigmas, (0.0, 1e4), (0.0, 1e3), (0.0, 100.0))
    for dtype, sigma, offset, padding, mean in places:
        points, mass, signal, weight = problem(options.points, offset, padding, mean, dtype)
        given = points, torch.tensor(sigma), mass, signal, weight
        exact = dense_gradients(*given)
        for method, backend in WAYS:
            about = {"dtype": str(dtype).removeprefix("torch."), "sigma": sigma, "offset": offset, "padding": padding,
                     "mean": mean, "method": method, "backend": backend}  # fmt: skip
            start = (
                "{dtype:>9} {sigma:5g} {offset:7g} {padding:8g} {mean:5g}  ".format(**about) + f"{method}, {backend}"
            )
            try:
                found = our_gradients(*given, method, backend)
            except (FourierError, NotImplementedError) as refusal:
                rows.append(about | {"refused": str(refusal).splitlines()[0]})
                continue
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
            is_bad = not max(errors) <= BOUNDS[dtype]
            bad += is_bad
            rows.append(about | {f"error by {name}": e for name, e in zip(NAMES, errors, strict=True)})
            print(f"{start:<56}" + "".join(f"{e:9.0e}" for e in errors) + "  ← above the bound" * is_bad, flush=True)
    findings = []
    for dtype, bound in BOUNDS.items():
        name = str(dtype).removeprefix("torch.")
        own = [row for row in rows if row["dtype"] == name and "refused" not in row]
        worst = {x: max(row[f"error by {x}"] for row in own) for x in NAMES}
        listed = ", ".join(f"{x} {e:.0e}" for x, e in worst.items())
        findings.append({"case": f"worst errors in {name} (bound {bound:g})", "qattn": listed, "others": ""})
        print(f"\n{findings[-1]['case']}: {listed}", end="")
    save("gradients", rows, findings, options.quick)
    if bad:
        sys.exit(f"{bad} of {len(rows)} are above the bound")


if __name__ == "__main__":
    main()
