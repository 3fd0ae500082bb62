"""Known reasons why single published rows differ from their prediction."""

from __future__ import annotations

from scripts.plan.published_rows import Row

UNKNOWN = "not explained"

# By table; and by row where a row has a reason of its own.
_TABLES: dict[str, str] = {
    "aiconfigurator_silicon": "experts over nodes; releases of one engine differ by up to 1.5 x",
    "automodel": "kernels of Transformer Engine with FSDP2; few rows of this stack",
    "bigscience_176b": "48 pipeline stages: the stage with the head decides",
    "deepseek_v3_report": "DualPipe hides communication of experts, which is counted as exposed",
    "dgxc_2025": "8 large experts on GB200, faster than dense layers of this stack",
    "fastertransformer": "whole generations of 8 to 200 tokens: prefill kernels of 2021",
    "internevo": "1,024 GPUs share one optimizer state: latency of 128 nodes",
    "korthikanti": "recalled from the paper, not read again",
    "litgpt_a100": "offload or quantisation of some rows is not stated",
    "litgpt_a10g": "activations of quantised layers with adapters",
    "lmdeploy": "queueing behind prompts of 2,048 tokens is in the rate",
    "megatron_2021": "micro-batch is not stated, 4 or 1 taken",
    "megatron_bridge": "containers of a half-year differ by up to 2 x; recomputation is not stated",
    "megatron_llama": "one row",
    "moe_zoo_qwen3": "recomputation and dispatcher differ between rows",
    "mosaicml_mpt": "small models are bound by the host",
    "mt_nlg": "recalled micro-batch",
    "nemo_2407": "first FP8 stack: slower than the later ones on which products were fitted",
    "nemo_long": "tokens of a batch are not stated; slow long attention of early 2024",
    "nemo_rl_959": "the source's own two runs differ by up to 18 %",
    "nemo_rl_v0.4": "lengths beyond their mean are not stated",
    "nemo_rl_v0.5": "lengths beyond their mean are not stated",
    "nemo_rl_v0.6": "training of the smaller half of the GPUs bounds the step",
    "prime_rl_bench": "eager RL losses at short rows; flash attention 2 beyond its table at 65,536",
    "qwen3_speed": "transformers: host per layer; SGLang: long prompts on an H20",
    "silybench": "preemption at the KV limit",
    "torchtitan_2024_08": "none above 10 %",
    "torchtitan_2024_12": "cp2: the causal halves are less uneven than taken",
    "torchtitan_async_tp": "scales per row were slower than 16-bit products",
    "torchtune": "precision of saved logits",
    "trtllm_v06": "engine of 2023; A100 rows may be totals instead of per GPU",
    "trtllm_v1": "ranks of experts are not stated",
}
_ROWS: dict[str, str] = {
    "r00505": "the stack's factor is of H100 and GB200, whose bf16 rows are slower",
    "r00525": "the stack's factor is of H100 and GB200, whose bf16 rows are slower",
    "r00343": "GB200, nvfp4: the factor of 4-bit products is of rows with experts",
    "r00439": "hybrid layers: few rows of this stack; the scan's factor is of Megatron",
    "r00325": "the newest container, twice as fast as a year before",
    "r01927": "transformers: block-scaled products without a fast kernel",
    "r02194": "one row of data parallel attention: how requests are counted is not stated",
    "r02859": "3 rows of vLLM with block-scaled weights on one GPU",
    "r00852": "tp1 pp48: the last stage holds a head of 250,000 tokens",
}


_MEMORY: dict[str, str] = {
    "bigscience_176b": "Mem is the maximum of the first and last node alone",
    "fastertransformer": "buffers of the smallest model",
    "litgpt_a100": "longest row and its micro-batch are not stated together",
    "litgpt_a10g": "activations of quantised layers with adapters differ by model",
    "prime_rl_bench": "chunk of the RL loss is not stated",
    "qwen3_speed": "8-bit weights with 16-bit embeddings of a small model",
    "torchtitan_2024_12": "operations that selective recomputation saves",
    "torchtune": "precision of saved logits",
}


def reason_of(row: Row, kind: str = "") -> str:
    """Return why a row is hard to predict, as far as known."""
    if kind == "memory":
        return _MEMORY.get(row["table"], UNKNOWN)
    return _ROWS.get(row["id"]) or _TABLES.get(row["table"]) or UNKNOWN
