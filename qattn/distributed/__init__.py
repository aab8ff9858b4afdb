"""Point clouds that are sharded over the ranks of a `torch.distributed` process group."""

from qattn.distributed.exchange import compact, gather, shard
from qattn.distributed.group import Group

__all__ = ["Group", "compact", "gather", "shard"]
