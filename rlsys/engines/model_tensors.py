"""What a model is, by name: its parameters and its persistent buffers.

Whatever copies a model, takes all of it from here: published weights, checkpoints, exports, engines
that load. A buffer belongs to the model as its parameters do: DeepSeek-V3 chooses experts by one
(e_score_correction_bias), Gemma 4 scales its layers by another (layer_scalar).
"""

from __future__ import annotations

from typing import Any

import torch


def model_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters, then persistent buffers, by Hugging Face name; tied ones once. Views, not copies.

    Buffers that are not persistent follow from the configuration: every instance makes its own.
    """
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in persistent}
    return dict(model.named_parameters()) | buffers
