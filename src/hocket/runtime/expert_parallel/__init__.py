"""Expert parallelism: every rank holds some of the experts, and tokens travel to theirs."""

from hocket.runtime.expert_parallel.apply import (
    apply_expert_parallel,
    balancer_of,
    gather_experts,
)
from hocket.runtime.expert_parallel.deep_ep import DeepEP
from hocket.runtime.expert_parallel.experts import ExpertParallelExperts
from hocket.runtime.expert_parallel.two_level import NodeAxes

__all__ = [
    "DeepEP",
    "ExpertParallelExperts",
    "NodeAxes",
    "apply_expert_parallel",
    "balancer_of",
    "gather_experts",
]
