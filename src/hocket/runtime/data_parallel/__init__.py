"""Data parallelism: replicas in processes (whole or sharded state) or in threads of one process."""

from hocket.runtime.data_parallel.buckets import Buckets, bucket_sizes
from hocket.runtime.data_parallel.sharded import Piece, ShardedBuckets
from hocket.runtime.data_parallel.threads import ThreadedReplicas

__all__ = ["Buckets", "Piece", "ShardedBuckets", "ThreadedReplicas", "bucket_sizes"]
