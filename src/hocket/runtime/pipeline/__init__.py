"""Pipeline parallelism: a module cut into stages, and the interpreter of a Schedule."""

from hocket.runtime.pipeline.cut import cut, cut_costs
from hocket.runtime.pipeline.executor import Executor
from hocket.runtime.pipeline.stage import Stage

__all__ = ["Executor", "Stage", "cut", "cut_costs"]
