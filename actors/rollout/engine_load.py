"""Counters and working time of an engine, reported once even if several policies share it.

PolicyRollouts "rollout-0"       ─┐
PolicyRollouts "rival-rollout-0" ─┴─► EngineLoad ─► trace and gauges of rollout-0
"""

from __future__ import annotations

from rlsys.engines.generation.generation_protocol import EngineStats, GenerationEngine
from rlsys.runs.observe.trace import Tracer

from ..cluster.gauges import (
    ENGINE_KV_USAGE,
    ENGINE_PREEMPTED,
    ENGINE_RUNNING,
    ENGINE_TOKENS,
    ENGINE_WAITING,
    Gauges,
)


class EngineLoad:
    """Load of one engine, under the name of the actor that has it."""

    def __init__(self, engine: GenerationEngine, tracer: Tracer, gauges: Gauges) -> None:
        self._engine = engine
        self._tracer = tracer
        self._gauges = gauges

    def book_work(self, tracer: Tracer, works: bool) -> None:
        """Book the begin or end of a policy's work on the engine.

        Work for another policy also counts under the name of the actor that has the engine.
        """
        for one in {tracer, self._tracer}:
            if works:
                one.job_begins()
            else:
                one.job_ends()

    def report(self) -> EngineStats:
        """Return the engine's counters after reporting them to the trace and to Prometheus."""
        stats = self._engine.stats()
        self._tracer.counter("running", stats.num_running)
        self._tracer.counter("waiting", stats.num_waiting)
        self._gauges.set(ENGINE_RUNNING, stats.num_running)
        self._gauges.set(ENGINE_WAITING, stats.num_waiting)
        self._gauges.set(ENGINE_TOKENS, stats.num_generated_tokens)
        self._gauges.set(ENGINE_PREEMPTED, stats.num_preempted)
        if stats.kv_usage is not None:
            self._tracer.counter("kv usage", stats.kv_usage)
            self._gauges.set(ENGINE_KV_USAGE, stats.kv_usage)
        if stats.draft_acceptance is not None:
            self._tracer.counter("draft acceptance", stats.draft_acceptance)
        if stats.draft_speedup is not None:
            self._tracer.counter("draft speedup", stats.draft_speedup)
        return stats
