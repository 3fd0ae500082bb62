"""Words for the methods of actors, for messages about failed calls.

doing("update_weights") ─► "loading new weights": rollout-0 died while loading new weights: ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_STORE: Final = "managing the memory of rollouts"
_SHARING: Final = "sending weights to other nodes"
_SNAPSHOT: Final = "keeping a snapshot of its state in memory"

WORDS: Final[Mapping[str, str]] = {
    "abort": "aborting rollouts",
    "accumulate": "computing gradients",
    "add_adapter": "loading an adapter",
    "address": _STORE,
    "answers": "sampling turns of episodes",
    "ask": "sampling turns of episodes",
    "beat": "sending a heartbeat",
    "blocked": "evaluating",
    "bytes_leased": _STORE,
    "clear_snapshots": "discarding its snapshots",
    "close": "ending",
    "collect": "working on rollouts",
    "compute": "computing values of a step",
    "discard": "discarding gradients",
    "drain": "finishing its running rollouts",
    "drain_trace": "sending its trace",
    "drop": "closing a model",
    "drop_adapter": "removing an adapter",
    "export": "exporting the model",
    "fetch": "sending rollouts to another node",
    "for_policy": "working on rollouts of another policy",
    "forward_backward": "running forward_backward",
    "free": _STORE,
    "hold": "preparing a checkpoint",
    "holdings": "moving its state to another layout",
    "import_weights": "receiving new weights from another node",
    "infer": "computing log-probabilities or values",
    "lease": _STORE,
    "load": "loading a checkpoint",
    "more": "running reward functions",
    "node": "starting",
    "offer_weights": _SHARING,
    "open": "loading a model",
    "open_snapshots": _SNAPSHOT,
    "optim_step": "running optim_step",
    "optimizer_step": "updating the weights",
    "place": "starting",
    "prefetch_lease": _STORE,
    "progress": "writing tokens of running rollouts",
    "publish": "publishing new weights",
    "reclaim": _STORE,
    "release": "freeing memory",
    "rendezvous": "starting",
    "report_unplayed": "reporting failed episodes",
    "reset_optimizer": "resetting the optimizer",
    "restore": "restoring a snapshot of its state",
    "run": "computing values of rollouts",
    "save": "saving a checkpoint",
    "save_for_sampler": "saving weights for a sampler",
    "score": "computing scores",
    "seal": _STORE,
    "send_weights": _SHARING,
    "serve_turns": "sampling turns of episodes",
    "sft_step": "taking a supervised step",
    "slot": _SNAPSHOT,
    "snapshot": _SNAPSHOT,
    "start": "starting",
    "start_evaluation": "starting an evaluation",
    "steps": _SNAPSHOT,
    "submit": "receiving requests",
    "take": "moving its state to another layout",
    "take_published": "loading new weights",
    "take_saved": "loading saved weights",
    "update_weights": "loading new weights",
    "use_store": "connecting to the store",
    "wait": "evaluating",
    "watch": "working on rollouts",
    "weight_delta": _SHARING,
    "withdraw": "stopping rollouts",
    "write": "writing a checkpoint",
}


def doing(method: str) -> str:
    """Return what an actor does in a method, as words after `while`."""
    return WORDS.get(method, f"answering {method}")
