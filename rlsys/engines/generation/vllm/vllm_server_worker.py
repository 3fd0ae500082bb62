r"""Worker of rlsys in a vLLM server outside of the run (rollout.urls).

    python -m vllm.entrypoints.openai.api_server \
        --worker-cls rlsys.engines.generation.vllm.vllm_server_worker.ServerWorker

Imports vllm: only vLLM's own processes import this module.
"""

from __future__ import annotations

from rlsys.engines.generation.vllm.vllm_server_calls import ServerCalls
from rlsys.engines.generation.vllm.vllm_worker import Worker


class ServerWorker(ServerCalls, Worker):
    """The worker of one tensor-parallel rank of a server."""
