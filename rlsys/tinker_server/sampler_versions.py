"""Numbers of sampler weights: the version that each sampled token carries."""

from __future__ import annotations

from collections.abc import Callable

from rlsys.tinker_server.server_backend import BaseModel
from rlsys.tinker_server.server_checkpoints import SamplerWeights, ServerCheckpoints


class WeightsIndex:
    """Sampler weights that this server has saved or read, by path. Each has a number of its own."""

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
        said = self._checkpoints.said(directory)
        self._found[path] = SamplerWeights(
            base_model=self._base_model(said.base_model).name,
            number=number,
            path=path,
            model=model,
            directory=directory,
            version=said.version,
        )
        return self._found[path]

    def get(self, path: str) -> SamplerWeights:
        """Return saved weights. Raises Refused, 404, where there are none."""
        self._checkpoints.parse(path, "sampler_weights")
        return self._found[path] if path in self._found else self.add(path, self.reserve())
