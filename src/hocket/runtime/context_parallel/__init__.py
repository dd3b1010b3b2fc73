"""Context parallelism: attention of sequences whose tokens are on several ranks."""

from hocket.runtime.context_parallel.ring import Ring
from hocket.runtime.context_parallel.ulysses import Ulysses

__all__ = ["Ring", "Ulysses"]
