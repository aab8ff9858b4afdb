"""Clouds that lie on several ranks of `torch.distributed`, each with a shard of the points."""

from qattn.distributed.group import Group
from qattn.distributed.kernel import ShardedGaussian
from qattn.distributed.shards import compact, gather, shard

__all__ = ["Group", "ShardedGaussian", "compact", "gather", "shard"]
