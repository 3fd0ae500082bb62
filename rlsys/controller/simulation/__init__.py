"""Simulation of a run without a cluster: workers that only take time, and a clock that jumps.

The real controller (rlsys.controller) calls the simulated workers through the protocols of
rlsys.controller.worker_protocols.
"""
