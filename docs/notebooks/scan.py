# %% [markdown]
# # From a scan to a spectrum
#
# A file of points, the modes of its shape, and a diffusion operator of one's own. Nothing is downloaded: the scan is a
# generated creature.

# %% alt="Modes 1, 3, 6 and 12 of the creature, red where positive and blue where negative"
import matplotlib.pyplot as plt
import torch

import qattn
from qattn import io, shapes
from qattn.pictures import camera_view, colormap, scatter, signed

made, normals = shapes.creature(8000)
io.write("scan.ply", io.Cloud(made.numpy()))

scan = io.read("scan.ply")  # or a file of yours: PLY, OBJ, LAS, PCD, CSV, …
points = torch.from_numpy(scan.points)
spectrum = qattn.spectrum(points, k=40)

view = camera_view(points, normals)


def draw(panels):
    _, axes = plt.subplots(1, len(panels), figsize=(14, 3.4), layout="constrained")
    for axis, (title, colors) in zip(axes, panels.items()):
        scatter(axis, *view, colors, size=60, title=title)


draw({f"mode {n}": signed(spectrum.vectors[:, n]) for n in (1, 3, 6, 12)})

# %% [markdown]
# ## The spectrum
#
# Nothing had to be chosen: bandwidth, masses, normals and the scale of frequencies follow from the points. The table
# says how. `frequencies` are those of the Laplacian of the surface.

# %%
spectrum

# %% [markdown]
# Frequencies belong to the shape, and σ should not show in them. With a larger one they stay, until the kernel reaches
# from one leg to the other.

# %% alt="Forty frequencies for three bandwidths, which nearly agree"
picture, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
for spacings in (2, 3, 4):
    frequencies = qattn.spectrum(points, k=40, sigma=spacings * scan.spacing).frequencies
    axis.plot(frequencies, ".-", label=f"σ = {spacings} spacings")
axis.set_xlabel("mode")
axis.set_ylabel("frequency")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## The operator
#
# To smooth signals, make an operator of your own. Q has as many rows as the scan has points, and is never stored:
# applying it is a pass of attention. Its table tells what it is made of; that of the kernel, which method was taken,
# and why.

# %%
q = qattn.diffusion(points, sigma=3 * scan.spacing, mass="density")  # three spacings, a good start
q

# %%
q.kernel

# %% [markdown]
# What makes it a diffusion is measured:

# %%
qattn.check_axioms(q)

# %% [markdown]
# ## Signatures
#
# The heat that stays at a point describes the shape around it, whatever the pose: ends of limbs keep most of it.

# %% alt="Heat kernel signatures at four times: ears, feet and tail first, then whole limbs"
signature = qattn.signatures.heat_kernel_signature(spectrum, num_times=4, scaled=True)  # (8000, 4)
level = (signature - signature.amin(0)) / (signature.amax(0) - signature.amin(0))
draw({f"time {n + 1} of 4": colormap("inferno", level[:, n]) for n in range(4)})
