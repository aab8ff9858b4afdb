# %% [markdown]
# # A million points
#
# Normalizing a million points and applying their diffusion takes seconds on two cores of a CPU, and no matrix of
# pairs is formed. The first of them waits some ten seconds for the compiler if loops are not compiled on this machine
# yet; `qattn warm` compiles them beforehand.

# %% alt="Noise on a million points of a bumpy planet, and the same noise diffused with three bandwidths"
import time

import matplotlib.pyplot as plt
import torch

import qattn
from qattn import shapes
from qattn.pictures import heat, render, show, signed

directions = shapes.sphere(1_000_000)
points = directions * (1 + 0.08 * torch.sin(7 * directions).prod(dim=1, keepdim=True))
torch.manual_seed(0)
noise = torch.randn(1_000_000, 2)

panels, runs = {"noise": noise[:, 0]}, {}
for sigma in (0.01, 0.05, 0.25):
    start = time.perf_counter()
    q = qattn.diffusion(points, sigma)
    smooth = q @ noise
    runs[sigma] = time.perf_counter() - start, q
    panels[f"σ = {sigma}"] = smooth[:, 0]

picture, axes = plt.subplots(1, 4, figsize=(14, 3.8), layout="constrained")
for axis, (title, signal) in zip(axes, panels.items()):
    show(axis, render(points, directions, signed(signal)), title)

# %%
for sigma, (seconds, q) in runs.items():
    error = float(q.kernel_error(num_rows=16))  # against exact sums over a million points
    how = f"{int(q.num_iter)} passes, method {q.kernel.method}"
    print(f"σ = {sigma:<5} {seconds:5.1f} s, {how}, row error {error:.0e}")

# %% [markdown]
# Small bandwidths visit near tiles of points only, large ones take FFTs; `method="auto"` estimates both:

# %%
runs[0.05][1].kernel

# %% [markdown]
# ## Heat
#
# A Dirac after five steps. It started on one point; its total stays.

# %% alt="Heat around a point of the planet"
q = runs[0.05][1]
dirac = torch.zeros(1_000_000, 1)
dirac[(directions @ torch.tensor([-0.4, 0.4, 0.8])).argmax()] = 1_000_000
start = time.perf_counter()
density = q.power(5, dirac)[:, 0]
print(f"{time.perf_counter() - start:.1f} s, total heat {density.mean():.4f}")
picture, axis = plt.subplots(figsize=(5, 5), layout="constrained")
show(axis, render(points, directions, heat(density)), "")

# %% [markdown]
# [The page on speed](../speed.md) compares with k-NN graphs, implicit Euler and PyKeOps, and [Several
# processes](../distributed.md) goes beyond one machine.
