# %% [markdown]
# # Splats
#
# Gaussian splats are points with covariances, and the covariances matter: a few long splats cover what takes many
# points. `MixtureKernel` measures the overlap of splats, so that heat flows along them.

# %% alt="A creature of flat splats: their colors with noise, and the colors diffused"
import matplotlib.pyplot as plt
import numpy as np
import torch

import qattn
from qattn import io, shapes
from qattn.pictures import heat, render, show

torch.manual_seed(0)
means, normals = shapes.creature(3000)
log_scales = torch.log(torch.tensor([0.03, 0.03, 0.004])).repeat(3000, 1)  # thin along the normal
half = torch.nn.functional.normalize(normals + torch.tensor([0.0, 0.0, 1.0]), dim=-1)
quaternions = torch.stack([0 * half[:, 0], *half.T], dim=1)  # half a turn takes z to the normal
logits = torch.full((3000,), 2.0)  # opacity 1 / (1 + e^−2) = 0.88

names = ["scale_0", "scale_1", "scale_2", "rot_0", "rot_1", "rot_2", "rot_3", "opacity"]
columns = torch.cat([log_scales, quaternions, logits[:, None]], dim=1).numpy()
attributes = dict(zip(names, np.ascontiguousarray(columns.T)))
io.write("splats.ply", io.Cloud(means.numpy(), None, attributes))

splats = io.read("splats.ply")  # or a .ply of a trained scene
q = qattn.diffusion(splats.kernel(sigma=0.02))

colors = (0.5 + 0.5 * torch.sin(6 * means)).clamp(0, 1)
noisy = (colors + 0.4 * torch.randn(3000, 3)).clamp(0, 1)
smooth = q @ noisy


def drawn(colors, per_splat=300):
    """Samples of each splat, in its color."""
    spread = torch.randn(3000, per_splat, 3) * log_scales.exp()[:, None]
    around = half[:, None]
    turned = 2 * (spread * around).sum(-1, keepdim=True) * around - spread  # by half a turn
    samples = (means[:, None] + turned).reshape(-1, 3)
    facing, shades = (x.repeat_interleave(per_splat, 0) for x in (normals, colors))
    return render(samples, facing, shades)


picture, axes = plt.subplots(1, 3, figsize=(15, 3.8), layout="constrained")
for axis, title, shades in zip(axes, ("colors", "with noise", "diffused"), (colors, noisy, smooth)):
    show(axis, drawn(shades), title)

# %%
q

# %% [markdown]
# ## Heat along splats
#
# The same Dirac, by splats and by their centers alone. With σ below the distance of the centers heat does not leave a
# point; splats overlap, and it flows.

# %% alt="Heat from the nose after 40 steps, by centers alone and by splats"
nose = int(means[:, 0].argmax())
densities = {}
for title, kernel in {
    "centers": qattn.GaussianKernel(means, 0.008),
    "splats": qattn.MixtureKernel.from_splats(*splats.splats, sigma=0.008),
}.items():
    operator = qattn.diffusion(kernel, tol=1e-5)
    dirac = torch.zeros(3000, 1)
    dirac[nose] = 1 / operator.mass.expand(3000)[nose]
    densities[title] = operator.power(40, dirac)[:, 0]
    reached = int((densities[title] > 1e-3 * densities[title].max()).sum())
    print(f"{title:8} {reached:4d} of 3000 are reached")

picture, axes = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained")
for axis, (title, density) in zip(axes, densities.items()):
    show(axis, drawn(heat(density)), title)

# %% [markdown]
# `qattn diffuse scene.ply --sigma 2x -o smooth.ply` does the same for files, and `qattn view scene.ply` shows it.
