"""The controller without a cluster: workers that only take time, and a clock that jumps.

The controller that is simulated is the controller that runs: rlsys.controller drives both through
the protocols of rlsys.controller.worker_protocols.
"""
