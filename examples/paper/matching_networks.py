"""Networks that give features to the points of a batch of samples: Q-DiffNet, and DiffusionNet as its peer.

They differ in how features spread: by Q_σᵐ, normalized as it goes, or by Φ exp(−tΛ) Φ⁺ with eigenvectors of
`robust_laplacian`. Inputs, gradients in tangent planes, widths, blocks and outputs are the same.
"""

import torch
from torch import nn

import qattn
from qattn.nn import QDiffNet

FEATURES = 256
SIGMA = 0.03, 0.5  # bandwidths to start from, for area 1
PRESETS = {
    "paper": {"num_scales": 32, "channels_per_scale": 8, "num_blocks": 4, "num_applications": 2},
    "small": {"num_scales": 16, "channels_per_scale": 8, "num_blocks": 4, "num_applications": 2},
    "tiny": {"num_scales": 8, "channels_per_scale": 8, "num_blocks": 2, "num_applications": 1},
}


class QNetwork(nn.Module):
    """Q-DiffNet of a preset, on batches of samples."""

    def __init__(self, in_channels, preset):
        super().__init__()
        # As published, the normalization is not differentiated.
        self.network = QDiffNet(
            in_channels,
            FEATURES,
            sigma_range=SIGMA,
            gradient="tangent",
            solver=qattn.Solver(adjoint="detach"),
            **PRESETS[preset],
        )

    def forward(self, batch):
        return self.network(batch.inputs, batch.points, batch.mass, gradients=batch.gradients)


class SpectralNetwork(nn.Module):
    """DiffusionNet as wide and deep as the Q-DiffNet of a preset, on batches of samples."""

    def __init__(self, in_channels, preset):
        super().__init__()
        sizes = PRESETS[preset]
        width = sizes["num_scales"] * sizes["channels_per_scale"]
        self.first, self.last = nn.Linear(in_channels, width), nn.Linear(width, FEATURES)
        self.blocks = nn.ModuleList(SpectralBlock(width) for _ in range(sizes["num_blocks"]))

    def forward(self, batch):
        x = self.first(batch.inputs)
        for block in self.blocks:
            x = block(x, batch)
        return self.last(x)


class SpectralBlock(nn.Module):
    """A block of `QDiffNet` around Φ exp(−tΛ) Φ⁺ f, with times t = σ² to start from."""

    def __init__(self, width):
        super().__init__()
        low, high = torch.tensor(SIGMA).log()
        self.log_time = nn.Parameter(2 * torch.linspace(low, high, width))
        self.mix, self.turn = (nn.Linear(width, width, bias=False) for _ in range(2))
        layers = [nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)]
        self.mlp = nn.Sequential(*layers)

    def forward(self, x, batch):
        decay = torch.exp(-batch.spread_frequencies[..., None] * self.log_time.exp())  # (B, k, C)
        diffused = batch.spread_vectors @ (decay * (batch.spread_projections @ x))
        across, up = (torch.stack([g @ f for g, f in zip(gs, diffused, strict=True)]) for gs in batch.gradients)
        products = across * (self.mix(across) - self.turn(up)) + up * (self.mix(up) + self.turn(across))
        return x + self.mlp(torch.cat([x, diffused, torch.tanh(products)], dim=-1))


NETWORKS = {"q": QNetwork, "spectral": SpectralNetwork}
