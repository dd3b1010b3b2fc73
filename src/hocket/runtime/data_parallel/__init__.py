"""Data parallelism: replicas in processes (whole or sharded state) or in threads of one process."""

from hocket.runtime.data_parallel.blocks import Fill, ShardedBlocks
from hocket.runtime.data_parallel.buckets import Buckets, bucket_sizes
from hocket.runtime.data_parallel.flat import FlatShard
from hocket.runtime.data_parallel.sharded import ShardedBuckets
from hocket.runtime.data_parallel.shares import Shares
from hocket.runtime.data_parallel.threads import ThreadedReplicas

__all__ = [
    "Buckets",
    "Fill",
    "FlatShard",
    "ShardedBlocks",
    "ShardedBuckets",
    "Shares",
    "ThreadedReplicas",
    "bucket_sizes",
]
