"""Expert parallelism: every rank holds some of the experts, and tokens travel to theirs."""

from hocket.runtime.expert_parallel.apply import apply_expert_parallel, gather_experts
from hocket.runtime.expert_parallel.experts import ExpertParallelExperts

__all__ = ["ExpertParallelExperts", "apply_expert_parallel", "gather_experts"]
