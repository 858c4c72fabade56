"""Faults that need no particular connector."""

from typing import Final

from kvreplay.sim.catalogue import FaultRow, Setting

ROWS: Final = (
    FaultRow(
        name="abort",
        models="a client that goes away (vllm/entrypoints/utils.py, with_cancellation)",
        verb="abort",
        target="client",
        survives="its blocks come back once no transfer uses them; no other request notices",
        short_name=True,
    ),
    FaultRow(
        name="peer-crash",
        models="an instance that dies: out of memory, a lost node, a killed pod",
        verb="crash",
        target="instance",
        survives="the others' requests end, failed or recomputed; nothing waits for it for ever",
        short_name=True,
    ),
    FaultRow(
        name="engine.restart",
        models="a rolling restart under the address that peers have cached",
        verb="restart",
        target="instance",
        survives="peers find the new process; nothing is read from or written for the old one",
    ),
    FaultRow(
        name="engine.step-raises",
        models="an exception in a model step (vllm/v1/engine/core.py, EngineDeadError)",
        verb="step-raises",
        target="instance",
        survives="the death of that instance stays its own",
    ),
    FaultRow(
        name="scheduler.preempt",
        models="a preemption at an unlucky moment (vllm/v1/core/sched/scheduler.py, _preempt_request)",
        verb="preempt",
        target="instance",
        survives="the request resumes and gives the same output",
    ),
    FaultRow(
        name="cache.reset",
        models="reset_prefix_cache under load (vllm/v1/core/block_pool.py)",
        verb="reset",
        target="instance",
        survives="only later hits are lost; blocks in use stay",
    ),
    FaultRow(
        name="cache.evict",
        models="cached blocks that are gone when they are wanted",
        verb="evict",
        target="instance",
        survives="what was evicted is computed again",
    ),
    FaultRow(
        name="config.override",
        models="an instance that runs with another setting than its peers expect",
        verb="config",
        target="config",
        survives="the mismatch is refused, or has no effect on contents",
        settings={
            "key": Setting(default="cache.num_gpu_blocks", doc="table and key"),
            "value": Setting(default="1024", doc="its value, as after --set KEY="),
        },
    ),
)
