# %% [markdown]
# # Smoothing and denoising
#
# One product with Q smooths a signal on a shape; the same product smooths the shape itself.

# %% alt="A wave on the creature: clean, with noise, and diffused with three bandwidths"
import matplotlib.pyplot as plt
import torch

import qattn
from qattn import bandwidths, shapes
from qattn.pictures import camera_view, facing_normals, scatter, signed

points, normals = shapes.creature(8000)
spacing = float(bandwidths.spacing(points))
torch.manual_seed(0)
clean = torch.sin(8 * points[:, 0])
noisy = clean + torch.randn(len(points))

multiples = (2, 4, 12)
diffused = {m: qattn.diffusion(points, sigma=m * spacing) @ noisy for m in multiples}

view = camera_view(points, normals)
panels = {"clean": clean, "with noise": noisy, **{f"σ = {m} spacings": diffused[m] for m in multiples}}
picture, axes = plt.subplots(1, 5, figsize=(16, 3.2), layout="constrained")
for axis, (title, signal) in zip(axes, panels.items()):
    scatter(axis, *view, signed(signal), size=45, title=title)

# %% [markdown]
# ## Which σ?
#
# Small σ leave noise, large ones take the signal along. The error has a minimum between, here at a few spacings.

# %% alt="Error against σ: what is left of the noise falls, what is lost of the signal grows"
rows = []
for multiple in (0.5, 1, 2, 3, 4, 6, 8, 12, 16):
    q = qattn.diffusion(points, sigma=multiple * spacing)
    both = q @ torch.stack([noisy - clean, clean], dim=1)  # Q is linear: noise and signal apart
    rows.append((multiple, both[:, 0].std(), (both[:, 1] - clean).std(), (both.sum(1) - clean).std()))

multiple, left, lost, error = torch.tensor(rows).T
picture, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
axis.loglog(multiple, left, ".--", label="noise left")
axis.loglog(multiple, lost, ".--", label="signal lost")
axis.loglog(multiple, error, "o-", label="error")
axis.set_xlabel("σ in spacings")
axis.legend(frameon=False)
plt.show()
best = multiple[error.argmin()]
print(f"smallest error {error.min():.2f}, of {(noisy - clean).std():.2f}, at σ = {best:g} spacings")

# %% [markdown]
# ## Noise of the points
#
# Positions are a signal too: `q @ points` moves every point to a mean of its neighbors. One step takes noise away;
# many steps shrink thin parts, as heat flow does.

# %% alt="A noisy creature, after one step and after six steps, which thin its limbs"
scan = points + 0.02 * torch.randn_like(points)
q = qattn.diffusion(scan, sigma=0.04)
clouds = {"scan": scan, "1 step": q @ scan, "6 steps": q.power(6, scan)}

picture, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
for axis, (title, cloud) in zip(axes, clouds.items()):
    turned, _ = camera_view(cloud, normals)
    gray = torch.full_like(cloud, 0.85)
    scatter(axis, turned, facing_normals(turned), gray, size=25, title=title)

# %%
for title, cloud in clouds.items():
    away = shapes.creature_distance(cloud).abs().mean()  # from the surface that was sampled
    print(f"{title:8} {away:.4f} from the surface, mean at {cloud.mean(0).norm():.4f}")

# %% [markdown]
# The mean of the points stays, because Q keeps mass. From files: `qattn diffuse scan.ply --sigma 3x -o smooth.ply`.
