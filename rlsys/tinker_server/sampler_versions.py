"""Numbers of sampler weights, which each sampled token carries as its version."""

from __future__ import annotations

from collections.abc import Callable

from rlsys.tinker_server.server_backend import BaseModel
from rlsys.tinker_server.server_checkpoints import SamplerWeights, ServerCheckpoints


class WeightsIndex:
    """Sampler weights that this server has saved or read, by path. Each has its own number."""

    def __init__(
        self, checkpoints: ServerCheckpoints, base_model: Callable[[str], BaseModel]
    ) -> None:
        self._checkpoints = checkpoints
        self._base_model = base_model
        self._found: dict[str, SamplerWeights] = {}
        self._count = 0

    def reserve(self) -> int:
        """Return a new number for weights that are about to be saved. 0 means a base model."""
        self._count += 1
        return self._count

    def add(self, path: str, number: int) -> SamplerWeights:
        """Return the weights that were just saved under this number."""
        model, directory = self._checkpoints.parse(path, "sampler_weights")
        saved = self._checkpoints.description(directory)
        self._found[path] = SamplerWeights(
            base_model=self._base_model(saved.base_model).name,
            number=number,
            path=path,
            model=model,
            directory=directory,
            version=saved.version,
            lora=saved.lora,
        )
        return self._found[path]

    def get(self, path: str) -> SamplerWeights:
        """Return saved weights.

        Raises:
            ApiError: 404, they do not exist.
        """
        self._checkpoints.parse(path, "sampler_weights")
        return self._found[path] if path in self._found else self.add(path, self.reserve())
