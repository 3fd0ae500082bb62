"""The controller: asynchronous loops over the stages of a dataflow.

                         ┌─────────────── gate opens ◄── sync ◄── weights, version v+1 ──┐
                         ▼                                                               │
    prompts ─► issue ─► replica ─► collect ─► score ─► advantage ─► train ─► optimizer step
                                      │          │          │          ▲
                                      └──────────┴── store ─┴──────────┘

Each loop takes rows from the store as soon as the columns that its stage reads are written. It then
writes the columns of its stage, which wakes the next loop. The controller handles metadata only. It
calls the workers through the protocols of rlsys.controller.worker_protocols, so Ray actors and a
simulation run under the same code. An error in any loop ends all loops and is raised from `run`.

    controller.py       all loops of a run, from its first to its last step
    generation_loop.py  issue and cancel; replicas.py: collect and sync
    scoring_loop.py     score, advantage
    inference_loop.py   infer
    training_loop.py    train
    checkpointing.py    checkpoint
    device_sharing.py   turns of training and generation on shared devices
    lender.py           the trainer's devices generate while it would wait; borrowed_replicas.py
    state.py            state that the loops share
"""
