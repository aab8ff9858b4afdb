"""Layers for networks on points: diffusion at learned scales, attention by diffusion, and the network of the paper."""

from qattn.nn.attention import QAttention, QBlock
from qattn.nn.diffnet import QDiffNet
from qattn.nn.diffusion import QDiffusion
from qattn.nn.multihead import QMultiheadAttention
from qattn.nn.point_transformer import QPointTransformer
from qattn.nn.tangent import tangent_gradients

__all__ = [
    "QAttention",
    "QBlock",
    "QDiffNet",
    "QDiffusion",
    "QMultiheadAttention",
    "QPointTransformer",
    "tangent_gradients",
]
