"""The words everything is made of. Standard library only; imports nothing of ours above.

Terms (docs/reference/glossary.md is made of these, and of the attributes of Layout, Workload and
Service):
    rank: one process of a job, which usually has one device.
    layout: how a job is split over ranks: `dp2.pp2.tp2`.
    replica: ranks that together have the whole model once; a layout has dp of them.
    stage: consecutive layers of a pipeline rank.
    mesh axis: one of dp, pp, cp, tp; a rank has one coordinate on each.
    process group: ranks that communicate in one collective, such as the tp ranks of a replica.
    collective: communication of a process group, such as all-reduce or all-gather.
    microbatch: sequences computed at once; gradients are accumulated over those of a step.
    bubble: fraction of a pipeline's time in which its ranks, on average, do not compute.
    exposed communication: communication that no compute overlaps.
    forward, backward (F, B): the actions of a schedule; where backward is divided, gradients of
        inputs (I) and of weights (W).
    activations: tensors of the forward that are kept for backward.
    masters: fp32 copies of bf16 parameters, which the optimizer steps.
    moments: AdamW's two averages of each gradient.
    MFU: model flops utilization: floating-point operations of the model over those that the device
        has at its peak.
    peak rank: the rank with the largest peak memory.
    prediction: time and memory of a run on this machine, from measurements of `hocket probe`.
    plan: time, memory and price on GPUs of the catalogue, from constants fitted to published runs.
    rehearsal: a job executed rank by rank on fake CUDA tensors, without values and times.
    proxy model: a tiny model of the same class, on which a split is checked before ranks start.
    ledger: predictions and measurements of the runs of this machine, in the user's home.
    prefill: the first step of a request, which computes its whole prompt.
    decode step: one token for each running request.
    KV cache: keys and values of earlier tokens, in blocks (paged).
    TTFT: time to first token.
    TPOT: time per output token after the first.
    goodput: fraction of the time in which a run that fails and restarts makes progress.
"""
