# %% [markdown]
# # A layer in your network
#
# `QAttention` is a layer like `nn.MultiheadAttention`: features in, features out. Its weights are the diffusion Q of
# the points, with a bandwidth per head that is learned. Here it is put into a small network.
#
# The task: every point of an animal carries a bad measurement of the part that it belongs to. Alone it cannot tell;
# together with its neighbors it can.

# %% alt="Parts of a creature in a new pose: right ones, by each point alone, by a network with diffusion"
import matplotlib.pyplot as plt
import torch
from torch import nn

from qattn import shapes
from qattn.nn import QAttention
from qattn.pictures import camera_view, colormap, facing_normals, scatter

NUM_PARTS = len(shapes.CREATURE_PARTS)


def example(num_points, seed):
    """Points in a random pose, measurements, parts."""
    rest = shapes.creature(num_points, seed)[0]
    parts = shapes.creature_parts(rest)
    noise = torch.randn(num_points, NUM_PARTS, generator=torch.Generator().manual_seed(seed))
    return shapes.posed(rest, seed), nn.functional.one_hot(parts, NUM_PARTS) + noise, parts


class Block(nn.Module):
    """Diffused features beside the features as they are, and an MLP on both."""

    def __init__(self, channels, is_diffusing):
        super().__init__()
        options = {"num_heads": 4, "sigma_range": (0.05, 0.5)}
        self.attention = QAttention(channels, **options) if is_diffusing else None
        layers = nn.Linear(2 * channels, channels), nn.ReLU(), nn.Linear(channels, channels)
        self.mlp = nn.Sequential(*layers)

    def forward(self, features, points):
        spread = features if self.attention is None else self.attention(features, points)
        return features + self.mlp(torch.cat([features, spread], dim=-1))


class Network(nn.Module):
    def __init__(self, is_diffusing, channels=32, num_blocks=2):
        super().__init__()
        self.first = nn.Linear(NUM_PARTS, channels)
        self.blocks = nn.ModuleList(Block(channels, is_diffusing) for _ in range(num_blocks))
        self.last = nn.Linear(channels, NUM_PARTS)

    def forward(self, measurements, points):
        features = self.first(measurements)
        for block in self.blocks:
            features = block(features, points)
        return self.last(features)


examples = [example(300, seed) for seed in range(12)]
clouds, measurements, labels = map(torch.stack, zip(*examples))  # (12, 300, …)


def train(is_diffusing, num_steps=60):
    torch.manual_seed(0)
    network = Network(is_diffusing)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses = []
    for step in range(num_steps):
        batch = torch.arange(4) + 4 * (step % 3)
        scores = network(measurements[batch], clouds[batch])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels[batch].flatten())
        optimizer.zero_grad()
        loss.backward()  # through the normalization, by features and bandwidths
        optimizer.step()
        losses.append(loss.item())
    return network, losses


networks = {"each point alone": train(False), "with diffusion": train(True)}

points, measured, parts = example(3000, seed=100)  # a new pose, and ten times the points
answers = {"right": parts}
with torch.no_grad():
    answers |= {name: network(measured, points).argmax(-1) for name, (network, _) in networks.items()}
view, _ = camera_view(points, points)
facing = facing_normals(view)
picture, axes = plt.subplots(1, 3, figsize=(14, 3.8), layout="constrained")
for axis, (name, answer) in zip(axes, answers.items()):
    title = f"{name}: {(answer == parts).float().mean():.0%}"
    scatter(axis, view, facing, colormap("tab10", answer / 9.99), size=90, title=title)

# %% alt="Losses of both networks"
picture, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
for name, (_, losses) in networks.items():
    axis.semilogy(losses, label=name)
axis.set_xlabel("step")
axis.set_ylabel("loss")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# The bandwidths moved from where they began, 0.05 to 0.5:

# %%
for number, block in enumerate(networks["with diffusion"][0].blocks):
    sigmas = block.attention.diffusion.sigma.tolist()
    print(f"block {number}: σ =", *(f"{sigma:.3f}" for sigma in sigmas))

# %% [markdown]
# Ready-made blocks and networks, padded and packed batches, and attention whose weights are Q are on [the page on
# layers](../layers.md).
