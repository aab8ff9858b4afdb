# %% [markdown]
# # Matching two shapes
#
# The same animal in two poses, sampled anew, with fewer points. Six landmarks are known on both; modes of Q and a
# functional map carry everything else over.

# %% alt="Colors of the creature at rest, and the same colors carried over to the walking one"
import matplotlib.pyplot as plt
import torch

import qattn
from qattn import bandwidths, shapes
from qattn.pictures import camera_view, facing_normals, scatter

first = shapes.creature(4000)[0]
rest = shapes.creature(3000, seed=1)[0]  # where the points of the second shape were before they moved
second = shapes.posed(rest, seed=3)

q, p = (qattn.diffusion(x, sigma=3 * float(bandwidths.spacing(x)), tol=1e-5) for x in (first, second))
a, b = qattn.eigsh(q, k=40), qattn.eigsh(p, k=40)

feet = [[x, -0.7, z] for x in (0.4, -0.5) for z in (0.2, -0.2)]
ends = torch.tensor([[1.0, 0.4, 0], [-0.8, 0.7, 0], *feet])  # nose, tail, four feet


def heat_from(operator, landmarks):
    """Heat from each landmark after 8 and 64 steps: features that both shapes have."""
    diracs = torch.zeros(operator.shape[-1], len(landmarks))
    diracs[landmarks, range(len(landmarks))] = operator.shape[-1]
    return torch.cat([operator.power(steps, diracs) for steps in (8, 64)], dim=1)


source = heat_from(q, torch.cdist(ends, first).argmin(1))  # (4000, 12)
target = heat_from(p, torch.cdist(ends, rest).argmin(1))  # (3000, 12)
C = qattn.maps.fit_functional_map(a, b, source, target)  # (40, 40)
C, index = qattn.maps.zoomout(a, b, C, start=10, stop=40, step=5)  # (3000,), points of the first shape

colors = (first - first.amin(0)) / (first.amax(0) - first.amin(0)) * 0.85 + 0.1
picture, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
pairs = {"first": (first, colors), "second": (second, colors[index])}
for axis, (title, (cloud, shades)) in zip(axes, pairs.items()):
    view, _ = camera_view(cloud, cloud)
    scatter(axis, view, facing_normals(view), shades, size=130, title=title)

# %% [markdown]
# ## How good is it?
#
# Where the points of the second shape were at rest is known here, so that errors can be measured; the body is 2 long.

# %% alt="Share of the points within an error, before and after ZoomOut"
initial = qattn.maps.point_map(a, b, qattn.maps.fit_functional_map(a, b, source, target))
picture, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
for name, match in {"functional map": initial, "with ZoomOut": index}.items():
    errors = (first[match] - rest).norm(dim=-1)
    label = f"{name}, mean {errors.mean():.3f}"
    axis.plot(errors.sort().values, torch.linspace(0, 100, len(errors)), label=label)
axis.set_xlim(0, 0.4)
axis.set_xlabel("error")
axis.set_ylabel("% of the points")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## The map itself
#
# C takes coefficients in the modes of one shape to those of the other. For isometric shapes it is orthogonal, and
# near the diagonal because modes come in the same order; a bent body is nearly isometric.

# %% alt="The matrix of the functional map, large near the diagonal"
picture, axis = plt.subplots(figsize=(4, 4), layout="constrained")
axis.imshow(C.numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
axis.set_xlabel("modes of the first shape")
axis.set_ylabel("modes of the second")
plt.show()
print(f"‖CCᵀ − I‖ / ‖I‖ = {(C @ C.T - torch.eye(40)).norm() / 40**0.5:.2f}")
