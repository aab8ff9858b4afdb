"""How long do first-order gradients of attention take, by number of dimensions and channels, and against whom?

Random features of D dimensions with scores of order 1 and values of C channels, float32: `attend` without gradients,
and with those by query, key, value and bias. Peers are torch's scaled dot-product attention on the lifted problem, as
one would write it, a dense softmax, and PyKeOps. Each gradient is first compared with a dense float64 one on a small
problem, by the same code; one that is wrong is not timed.
"""

import argparse
import functools
import itertools

import torch
from _measure import finding, parsed, save, seconds
from torch.nn.functional import pad, scaled_dot_product_attention

import qattn

BOUND = 1e-3
PYKEOPS_CHANNELS = 8  # PyKeOps compiles five formulas for each D and C, for a minute or two: it is given one C
SLOW = {"pykeops": 2_000_000_000, "dense torch": 400_000_000}  # the most pairs times (D + C) / 8 that each is given


def by_qattn(backend, query, key, value, bias):
    return qattn.attend(query, key, value, bias=bias, backend=backend).out


def by_sdpa(query, key, value, bias):
    """The lift written by hand, padded to one width so that torch takes its flash kernel."""
    one_query, one_key = (torch.ones_like(x[:, :1]) for x in (query, key))
    squares = [-0.5 * x.square().sum(-1, keepdim=True) for x in (query, key)]
    lifted = torch.cat([query, squares[0], one_query], -1), torch.cat([key, one_key, squares[1] + bias[:, None]], -1)
    width = -(-max(lifted[0].shape[-1], value.shape[-1]) // 16) * 16
    tensors = [pad(x, (0, width - x.shape[-1]))[None, None] for x in (*lifted, value)]
    return scaled_dot_product_attention(*tensors, scale=1.0)[0, 0, :, : value.shape[-1]]


def by_dense(query, key, value, bias):
    squares = [x.square().sum(-1) for x in (query, key)]
    scores = query @ key.T - 0.5 * (squares[0][:, None] + squares[1]) + bias
    return scores.softmax(-1) @ value


def by_pykeops(query, key, value, bias):
    from pykeops.torch import LazyTensor

    x, y = LazyTensor(query[:, None]), LazyTensor(key[None])
    scores = -((x - y) ** 2).sum(-1) / 2 + LazyTensor(bias[None, :, None])
    return scores.sumsoftmaxweight(LazyTensor(value[None]), dim=1)


CANDIDATES = {
    "native": functools.partial(by_qattn, "native"),
    "sdpa": functools.partial(by_qattn, "sdpa"),
    "torch sdpa": by_sdpa,
    "dense torch": by_dense,
    "pykeops": by_pykeops,
}


def problem(N, D, C, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    tensors = draw(N, D) / D**0.5, draw(N, D) / D**0.5, draw(N, C), draw(N)
    return [x.to(dtype) for x in tensors], draw(N, C).to(dtype)


def gradients(run, tensors, grad):
    leaves = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(run(*leaves), leaves, grad)


def error(run, D, C):
    """Largest relative error of the gradients by query, key, value and bias of 500 points."""
    exact = gradients(by_dense, *problem(500, D, C, torch.float64))
    ours = gradients(run, *problem(500, D, C))
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True))


def forward(run, tensors):
    with torch.no_grad():
        run(*tensors)


def measure(sizes, dims, channels, budget):
    rows = []
    for N, D, C in itertools.product(sizes, dims, channels):
        tensors, grad = problem(N, D, C)
        for name, run in CANDIDATES.items():
            if SLOW.get(name, float("inf")) < N * N * (D + C) / 8 or (name == "pykeops" and C != PYKEOPS_CHANNELS):
                continue
            row = {"name": name, "N": N, "D": D, "C": C, "error": error(run, D, C)}
            if row["error"] < BOUND:
                row["forward"] = seconds(functools.partial(forward, run, tensors), budget)
                row["both"] = seconds(functools.partial(gradients, run, tensors, grad), budget)
            rows.append(row)
        report([row for row in rows if (row["N"], row["D"], row["C"]) == (N, D, C)])
    return rows


def report(rows):
    base = next(row for row in rows if row["name"] == "native")
    cells = [
        f"{row['name']} {row['both'] * 1e3:.1f} ms ({row['both'] / base['both']:.2f}×)" if "both" in row else
        f"{row['name']} wrong: error {row['error']:.0e}"
        for row in rows
    ]  # fmt: skip
    print(
        f"  N = {base['N']:6,}  D = {base['D']:2}  C = {base['C']:2}  forward {base['forward'] * 1e3:6.1f} ms, "
        f"with backward {base['both'] / base['forward']:.1f}× of it; {'; '.join(cells)}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2_000, 10_000])
    parser.add_argument("--dims", type=int, nargs="+", default=[3, 8, 16, 64])
    parser.add_argument("--channels", type=int, nargs="+", default=[8, 16, 40, 64])
    options = parsed(parser, sizes=[1_000], dims=[3, 16], channels=[8, 40])
    print(__doc__.splitlines()[0])
    rows = measure(options.sizes, options.dims, options.channels, 0.2 if options.quick else 2.0)
    cases = dict.fromkeys((row["N"], row["D"], row["C"]) for row in rows)
    findings = [
        finding(
            f"{N:,} points, D = {D}, C = {C}",
            "{both:.3f} s forward and backward",
            [row for row in rows if (row["N"], row["D"], row["C"]) == (N, D, C)],
            "both",
        )
        for N, D, C in cases
    ]
    save("backward", rows, findings, options.quick)


if __name__ == "__main__":
    main()
