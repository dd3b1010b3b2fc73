"""Data parallelism: replicas in processes (overlapped buckets) or in threads of one process."""

from hocket.runtime.data_parallel.buckets import Buckets, bucket_sizes
from hocket.runtime.data_parallel.threads import ThreadedReplicas

__all__ = ["Buckets", "ThreadedReplicas", "bucket_sizes"]
