"""The check that every model passes before it is trained or sampled."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.engines.generation.torch.backbone import Backbone
from rlsys.engines.generation.torch.kv_cache import SlotCache
from rlsys.engines.models import attention
from rlsys.engines.models.architecture_probe import MODEL_CLASS, check_architecture
from rlsys.engines.models.attention import AttentionRule, UnknownComputation
from rlsys.engines.models.attention_context import UNBOUNDED, context_length, row_limit
from rlsys.engines.models.causal_lm import load_causal_lm, use_engine_layers
from rlsys.engines.models.collate import collate
from rlsys.engines.models.probe_model import build_miniature, miniature_config
from rlsys.engines.models.token_policy import TokenPolicy
from scripts.small_models import build
from tests.engines.torch_engine_harness import build_model
from tests.engines.training_harness import make_rows
from tests.errors import invalid
from tests.tiers import rest_slow

# Settings of models that have no window by default.
WINDOWS = {"phimoe": {"sliding_window": 2047}}


def loaded(model_type: str, **settings: Any) -> Any:
    """Return a small model of that type as load_causal_lm returns it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **(WINDOWS.get(model_type, {}) | settings))
    model = build_miniature(AutoModelForCausalLM._model_mapping[type(config)], config)
    use_engine_layers(model)
    return model


def phi3_config() -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "phi3",
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 48,
            "long_factor": [1.0 + i for i in range(48)],
        },
    )


@pytest.mark.slow
def test_attention_sinks_run_in_both_engines() -> None:
    model = loaded("gpt_oss")
    assert check_architecture(model).packs
    Backbone(model)


@pytest.mark.slow
def test_multipliers_run_in_both_engines_and_are_not_fused_away() -> None:
    model = loaded(
        "granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.05,
        logits_scaling=8.0,
    )
    assert check_architecture(model).packs
    assert not Backbone(model).is_fused


@pytest.mark.slow
@pytest.mark.parametrize("model_type", rest_slow(["cohere", "phimoe"]))
def test_logit_scales_and_windows_that_are_masks_only_run_in_both_engines(model_type: str) -> None:
    model = loaded(model_type)
    assert check_architecture(model).packs
    Backbone(model)


@pytest.mark.slow
def test_chunks_run_in_both_engines() -> None:
    """Check Llama 4 without its temperature, which depends on a token's place in the row."""
    model = loaded("llama4_text", attn_temperature_tuning=False)
    assert check_architecture(model).packs
    Backbone(model)


def test_rows_are_padded_if_packing_changes_the_result() -> None:
    assert not check_architecture(loaded("llama4_text")).packs


@pytest.mark.slow
def test_attention_that_cannot_be_replaced_trains_on_padded_rows_and_is_not_sampled() -> None:
    model = loaded("bloom")
    assert not check_architecture(model).packs
    with invalid("model.path") as refused:
        Backbone(model)
    assert "BloomForCausalLM" in refused.value.rule
    assert "vllm" in str(refused.value)


@pytest.mark.slow
def test_a_recurrent_state_is_not_sampled() -> None:
    model = loaded("mamba")
    assert not check_architecture(model).packs
    with invalid("model.path") as refused:
        Backbone(model)
    assert "MambaForCausalLM" in refused.value.rule
    assert "vllm" in str(refused.value)


def test_a_model_that_attends_to_later_tokens_is_refused() -> None:
    with invalid(MODEL_CLASS, "XLNetLMHeadModel") as refused:
        check_architecture(loaded("xlnet", n_layer=2, d_model=64, n_head=2, d_inner=64))
    assert refused.value.__cause__ is None


def test_an_own_mask_of_a_model_is_refused() -> None:
    with invalid(MODEL_CLASS, "DogeForCausalLM") as refused:
        check_architecture(loaded("doge"))
    assert isinstance(refused.value.__cause__, UnknownComputation)
    assert "a Tensor" in refused.value.rule


def test_a_class_that_reads_masks_by_itself_is_refused() -> None:
    with invalid(MODEL_CLASS, "DogeForCausalLM") as refused:
        check_architecture(build("doge")[0])
    assert not isinstance(refused.value.__cause__, UnknownComputation)
    assert "DogeAttention." in refused.value.rule


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_slow(["rembert", "electra"]))
def test_layers_between_the_last_one_and_the_head_are_refused(name: str) -> None:
    """The error names both widths, not the kernel in which torch would fail."""
    model = build(name)[0]
    with invalid(MODEL_CLASS, type(model).__name__) as refused:
        check_architecture(model)
    assert isinstance(refused.value.__cause__, UnknownComputation)
    assert re.search(r"width \d+ .*width \d+", refused.value.rule)
    assert "primitive" not in str(refused.value)


def test_a_model_that_cannot_be_differentiated_is_refused() -> None:
    with invalid(MODEL_CLASS, "ReformerModelWithLMHead") as refused:
        check_architecture(loaded("reformer", is_decoder=True))
    assert refused.value.__cause__ is not None


def test_a_head_that_is_not_linear_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("llama")
    plain = type(model).forward

    def doubled(self: Any, *args: Any, **inputs: Any) -> Any:
        output = plain(self, *args, **inputs)
        output.logits *= 2
        return output

    monkeypatch.setattr(type(model), "forward", doubled)
    with invalid(MODEL_CLASS, "LlamaForCausalLM"):
        check_architecture(model)


def test_the_check_does_not_use_the_weights(tmp_path: Path) -> None:
    """In bfloat16 these weights round to other tokens, as real ones do for rare tokens."""
    path = build_model(tmp_path, "llama")
    model = load_causal_lm(path, dtype="float32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30)
    model.save_pretrained(path)
    Backbone(load_causal_lm(path, dtype="bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", rest_slow([1, 5]))
def test_the_smallest_vocabularies_are_checked_too(vocabulary: int) -> None:
    model = loaded("llama", vocab_size=vocabulary, bos_token_id=0, eos_token_id=0)
    Backbone(model)
    assert TokenPolicy(model).packs


def test_the_generator_of_torch_stays_as_it_was() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    loaded("llama")
    assert torch.equal(torch.rand(2), expected)


def test_a_miniature_has_every_kind_of_layer() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=12)
    small = miniature_config(config)
    assert sorted(small.layer_types) == ["full_attention", "sliding_attention"]
    assert small.sliding_window == 5
    assert AutoConfig.for_model("gemma2").attn_logit_softcapping == 50
    assert miniature_config(AutoConfig.for_model("gemma2")).attn_logit_softcapping == 2
    assert small.query_pre_attn_scalar == config.query_pre_attn_scalar

    config = AutoConfig.for_model("deepseek_v3")
    small = miniature_config(config)
    assert (small.num_hidden_layers, small.first_k_dense_replace) == (2, 1)

    config = AutoConfig.for_model("qwen3_next")
    assert sorted(miniature_config(config).layer_types) == ["full_attention", "linear_attention"]


def test_a_miniature_has_no_zeros_and_ones() -> None:
    for model in (loaded("gpt_oss"), loaded("deepseek_v3")):
        state = model.state_dict()
        assert any("sinks" in name or "correction_bias" in name for name in state)
        for name, tensor in state.items():
            assert 0 not in tensor, name
            assert 1 not in tensor, name


def test_contexts() -> None:
    from transformers import AutoConfig

    assert context_length(AutoConfig.for_model("llama", max_position_embeddings=77)) == 77
    assert context_length(AutoConfig.for_model("bloom")) == UNBOUNDED
    assert context_length(AutoConfig.for_model("mpt", max_seq_len=99)) == 99
    assert row_limit(AutoConfig.for_model("llama")) is None
    assert context_length(phi3_config()) == row_limit(phi3_config()) == 4096
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = AutoConfig.for_model("llama", max_position_embeddings=50, rope_parameters=dynamic)
    assert row_limit(config) == 50


@pytest.mark.slow
def test_rows_whose_length_changes_all_rotary_angles_are_refused() -> None:
    """The limit is 16 tokens in the miniature."""
    config = phi3_config()
    model = build_miniature(_phi3_class(), config)
    use_engine_layers(model)
    Backbone(model)
    policy = TokenPolicy(model)
    short, long = make_rows(2, seed=1), make_rows(12)
    assert policy.packs
    policy(collate([row for row in short if len(row.token_ids) < 8]), 1.0)
    with invalid("tokens of a row") as refused:
        policy(collate(long), 1.0)
    assert refused.value.value > 16


def _phi3_class() -> Any:
    from transformers import Phi3ForCausalLM

    return Phi3ForCausalLM


@pytest.mark.parametrize(
    ("model_type", "without"),
    rest_slow([("gpt_oss", "sinks"), ("phimoe", "sliding_window"), ("gemma2", "softcap")]),
)
def test_the_check_notices_what_attention_leaves_out(
    model_type: str, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = attention.causal_attention
    forgotten: dict[str, Any] = {without: None}

    def forgetful(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule, **_: Any
    ) -> torch.Tensor:
        return whole(query, key, value, replace(rule, **forgotten))

    monkeypatch.setattr(attention, "causal_attention", forgetful)
    model = loaded(model_type)
    with invalid(MODEL_CLASS, type(model).__name__):
        check_architecture(model)


def test_the_check_notices_what_decoding_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop a window in the cache only."""
    model = loaded("phimoe")
    whole = SlotCache.attend_one

    def forgetful(
        self: SlotCache,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        return whole(self, layer, query, key, value, replace(rule, sliding_window=None))

    monkeypatch.setattr(SlotCache, "attend_one", forgetful)
    check_architecture(model)
    with invalid("model.path") as refused:
        Backbone(model)
    assert type(model).__name__ in refused.value.rule
