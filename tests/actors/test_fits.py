"""Runs that do not fit onto their machines are rejected before they start."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import LlamaConfig, Qwen3Config

import rlsys
from actors.run import demands
from actors.run.capacity import Capacity, check_run, machines_of, unwritable
from actors.run.demands import CONTEXT_BYTES
from recipes import arithmetic
from recipes.grpo import GRPOConfig, grpo
from recipes.quickstart import QuickstartConfig
from rlsys import DataConfig, HeldOutConfig, ModelConfig, RolloutConfig, SamplingConfig
from rlsys.config import TrainerConfig
from rlsys.config.machine import CARDS, GIB, Machine, parse_machines
from rlsys.engines.models.model_shape import model_shape
from rlsys.launcher.memory_estimate import cache_fault, estimate_memory
from rlsys.launcher.rank_estimate import RankMemory
from rlsys.planner.run_plan import Placement
from tests.errors import invalid
from tests.tiers import rest_slow


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Config of SmolLM2-135M: 134,515,008 parameters, 23,040 bytes of KV cache per token in 16
    bits.
    """
    directory = tmp_path_factory.mktemp("smollm")
    LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def eight_b(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Config of Qwen3-8B."""
    directory = tmp_path_factory.mktemp("qwen3-8b")
    Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(directory)
    return str(directory)


def test_a_replica_of_the_torch_engine_has_weights_and_its_cache(smollm: str) -> None:
    config = GRPOConfig(model=ModelConfig(path=smollm))
    replica = estimate_memory(config, model_shape(smollm)).replica
    assert replica.num_bytes == 134_515_008 * 4 + GIB  # 1.5 GiB
    more = replace(config, rollout=RolloutConfig(kv_cache_gib=3.0))
    assert estimate_memory(more, model_shape(smollm)).replica.num_bytes == 134_515_008 * 4 + 3 * GIB
    # Four sequences of 1,024 and 256 tokens take less than a GiB.
    few = replace(config, rollout=RolloutConfig(max_running=4))
    expected = 134_515_008 * 4 + 4 * 1280 * 46_080
    assert estimate_memory(few, model_shape(smollm)).replica.num_bytes == expected


def test_a_replica_of_vllm_has_a_share_of_its_card(smollm: str) -> None:
    rollout = RolloutConfig(engine="vllm", num_gpus=1, gpu_memory_frac=0.6)
    config = GRPOConfig(model=ModelConfig(path=smollm), rollout=rollout)
    replica = estimate_memory(config, model_shape(smollm)).replica
    assert replica.on_each_device(80 * GIB) == 48 * GIB
    assert replica.cache_on(80 * GIB) == 48 * GIB - 134_515_008 * 4
    on_cpu = replace(config, rollout=replace(rollout, num_gpus=0, kv_cache_gib=2.0))
    cpu = estimate_memory(on_cpu, model_shape(smollm)).replica
    assert cpu.num_bytes == 134_515_008 * 4 + 2 * GIB


def test_a_cache_below_one_sequence_is_rejected_with_the_size_that_fits(smollm: str) -> None:
    # 1,280 tokens of 46,080 bytes are 0.05493 GiB.
    config = GRPOConfig(model=ModelConfig(path=smollm), rollout=RolloutConfig(kv_cache_gib=0.001))
    shape = model_shape(smollm)
    fault = cache_fault(config, shape, None)
    assert fault is not None
    assert "rollout.kv_cache_gib=0.001" in fault
    assert "rollout.kv_cache_gib=0.055 " in fault
    enough = replace(config, rollout=RolloutConfig(kv_cache_gib=0.055))
    assert cache_fault(enough, shape, None) is None
    # A share of a card: 538 MB of weights and 59 MB do not fit into 10 % of 4 GiB.
    share = RolloutConfig(engine="vllm", num_gpus=1, gpu_memory_frac=0.1)
    on_card = replace(config, rollout=share)
    fault = cache_fault(on_card, shape, 4 * GIB)
    assert fault is not None
    assert "rollout.gpu_memory_frac=0.14 " in fault
    wider = replace(on_card, rollout=replace(share, gpu_memory_frac=0.14))
    assert cache_fault(wider, shape, 4 * GIB) is None


def checked(config: GRPOConfig, machine: str) -> Capacity:
    flow: rlsys.Dataflow = grpo(config, [lambda rollout: 1.0])
    return check_run(config, flow, model_shape(config.model.path), parse_machines(machine))


def ranks_of(gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the estimate by 8 GiB per rank and `gib` for micro-batches of 16,384 tokens."""

    def estimated(config: Any, trained: Any, shape: Any, head: Any) -> RankMemory:
        activations = gib * trained.trainer.micro_batch_tokens / 16384
        if trained.model.gradient_checkpointing == "full":
            activations /= 2
        return RankMemory(
            weights=2 * GIB,
            gradients=2 * GIB,
            moments=4 * GIB,
            passes=int(activations * GIB),
            on_gpu=trained.trainer.num_gpus > 0,
        )

    monkeypatch.setattr(demands, "estimate_rank", estimated)
    monkeypatch.setattr("actors.run.fit_advice.estimate_rank", estimated)


def separate(path: str, **rollout: Any) -> GRPOConfig:
    return GRPOConfig(
        model=ModelConfig(path=path, dtype="bfloat16"),
        trainer=TrainerConfig(layout="dp2", num_gpus=1),
        rollout=RolloutConfig(engine="vllm", num_replicas=2, num_gpus=1, **rollout),
    )


def test_the_smallest_change_is_named_and_fits(
    smollm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 8 + 0.7 GiB and activations of 24 GiB: 24 GiB hold micro-batches of half the tokens.
    ranks_of(24, monkeypatch)
    config = separate(smollm)
    assert checked(config, "4x40GiB").fits
    short = checked(config, "4x24GiB")
    assert not short.fits
    assert "8.7 GiB are missing" in short.verdict
    assert short.advice.endswith("trainer.micro_batch_tokens=8192.")
    fewer = replace(config, trainer=replace(config.trainer, micro_batch_tokens=8192))
    assert checked(fewer, "4x24GiB").fits
    # 18 GiB hold neither; 8.7 and 9 do, with micro-batches of 4,096 and recomputation.
    again = checked(config, "4x12GiB")
    assert again.advice.endswith("trainer.micro_batch_tokens=2048.")
    # The state alone is too large, but its moments fit into host memory.
    tight = checked(config, "4x7GiB")
    assert 'trainer.optimizer_state="cpu_float32"' in tight.advice
    assert checked(config, "4x4GiB").advice.endswith("4xA100-40G.")


def test_a_missing_gpu_is_rejected_with_the_cards_that_fit(
    smollm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_of(24, monkeypatch)
    short = checked(separate(smollm), "2xH100")
    assert " 4 GPUs" in short.shortages[0].message
    assert short.advice.endswith(" 4xH100.")


def test_the_advice_for_a_shared_card_is_a_smaller_share(
    smollm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Colocated: a rank of 32.7 GiB and 85 % of the card, of which one holds memory at a time.
    ranks_of(24, monkeypatch)
    config = replace(separate(smollm), placement="colocated")
    assert checked(config, "2x40GiB").fits
    # One replica over both cards: each card has one rank and half of the replica, in turns.
    split = replace(config.rollout, num_replicas=1, tensor_parallel=2, num_gpus=2)
    capacity = checked(replace(config, rollout=split), "2x40GiB")
    assert capacity.fits
    (demand,) = capacity.layout.nodes[0].demands
    assert (demand.name, demand.num_gpus) == ("trainer with rollout-0", 2)
    assert demand.device_bytes == 32 * GIB + CONTEXT_BYTES
    assert [device.used_bytes for device in capacity.layout.nodes[0].devices] == [
        max(demand.device_bytes, int(0.85 * 40 * GIB))
    ] * 2
    # Two replicas with half a card each: 2 x 85 % are 170 %.
    halves = GRPOConfig(
        model=ModelConfig(path=smollm, dtype="bfloat16"),
        rollout=RolloutConfig(engine="vllm", num_replicas=2, num_gpus=0.5),
    )
    short = checked(halves, "1x40GiB")
    assert short.advice.endswith("rollout.gpu_memory_frac=0.48.")
    fewer = replace(halves, rollout=replace(halves.rollout, gpu_memory_frac=0.48))
    assert checked(fewer, "1x40GiB").fits


def test_a_colocated_rank_has_its_state_in_host_memory_and_no_activations(
    smollm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While replicas generate, 2 GiB of weights and 4 GiB of moments of each rank are moved."""
    config = separate(smollm)

    def host_bytes(placement: Placement, gib: float, *, is_moved: bool = False) -> int:
        ranks_of(gib, monkeypatch)
        state: Literal["float32", "cpu_float32"] = "cpu_float32" if is_moved else "float32"
        trainer = replace(config.trainer, optimizer_state=state)
        return (
            checked(replace(config, placement=placement, trainer=trainer), "4x80GiB")
            .layout.nodes[0]
            .host_bytes
        )

    for gib in (1, 24):
        assert host_bytes("colocated", gib) == host_bytes("separate", gib) + 2 * 6 * GIB
    offloaded = host_bytes("colocated", 1, is_moved=True)  # the moments are there in any case
    assert offloaded == host_bytes("separate", 1, is_moved=True) + 2 * 2 * GIB


@pytest.mark.slow  # a minute for each estimate of an 8B model
def test_an_8b_model_on_four_cards(eight_b: str) -> None:
    config = GRPOConfig(
        model=ModelConfig(path=eight_b, dtype="bfloat16"),
        trainer=TrainerConfig(layout="dp4", num_gpus=1),
        rollout=RolloutConfig(engine="vllm", num_replicas=4, num_gpus=1),
    )
    assert checked(config, "8xH200").fits
    short = checked(config, "8xH100")
    assert "79.6 GiB" in short.verdict
    assert "trainer.micro_batch_tokens=8192." in short.verdict


def test_the_cards_of_a_cluster_come_from_its_nodes() -> None:
    nodes: Sequence[dict[str, float]] = [
        {"CPU": 8, "GPU": 2, "accelerator_type:H100": 1.0},
        {"CPU": 8},
        {"CPU": 8, "GPU": 1, "accelerator_type:UNKNOWN": 1.0},
    ]
    first, second, third = machines_of(nodes)
    assert [one.num_bytes for one in first.devices] == [int(CARDS["H100"] * GIB)] * 2
    assert second.devices == ()
    assert third.devices[0].num_bytes > 10**18  # an unknown card is not rejected


def test_evaluation_and_roles_are_counted(smollm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_of(1, monkeypatch)
    config = GRPOConfig(
        model=ModelConfig(path=smollm),
        evaluation=HeldOutConfig(every=1, num_gpus=1),
        rollout=RolloutConfig(num_gpus=1),
        trainer=TrainerConfig(num_gpus=1),
    )
    capacity = checked(config, "3x40GiB")
    assert capacity.layout is not None
    (node,) = capacity.layout.nodes
    by_name = {one.name: one for one in node.demands}
    assert by_name["evaluation"].device_bytes == 134_515_008 * 4 + GIB + CONTEXT_BYTES
    assert by_name["rollout-0"].device_bytes == 134_515_008 * 4 + GIB + CONTEXT_BYTES
    assert by_name["trainer-0"].device_bytes == 9 * GIB + CONTEXT_BYTES


def test_a_version_in_the_memory_of_gpus_is_counted(
    smollm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_of(1, monkeypatch)
    config = separate(smollm, weight_transport="cuda_ipc")
    capacity = checked(config, "4x40GiB")
    assert capacity.fits
    by_name = {one.name: one for one in capacity.layout.nodes[0].demands}
    # Two bytes per parameter, of which each of two ranks has half.
    assert by_name["trainer-0"].device_bytes == 9 * GIB + CONTEXT_BYTES + 134_515_008


def test_cuda_ipc_needs_a_node_with_a_rank_and_a_replica(
    smollm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_of(1, monkeypatch)
    config = separate(smollm, weight_transport="cuda_ipc")
    assert checked(config, "2x2x40GiB").fits
    short = checked(config, "4x1x40GiB")
    assert [one.message.partition(":")[0] for one in short.shortages] == [
        "rollout.weight_transport='cuda_ipc'"
    ]
    assert checked(separate(smollm), "4x1x40GiB").fits
    halves = replace(
        config,
        trainer=TrainerConfig(num_gpus=0.5),
        rollout=RolloutConfig(num_gpus=0.5, weight_transport="cuda_ipc"),
    )
    assert checked(halves, "1x40GiB").fits


def quickstart(directory: Path, **settings: Any) -> QuickstartConfig:
    defaults: dict[str, Any] = {"runs_dir": str(directory / "runs")}
    return QuickstartConfig(**{**defaults, **settings})


def dry(config: QuickstartConfig, dry_run: bool | str = True) -> None:
    arithmetic.run(config, grpo, dry_run=dry_run)


@pytest.mark.parametrize(
    ("machines", "suggested"),
    [("2xH100", "5xH100"), ("1x2xL4", "5xL4"), ("2x24GiB", "5x24GiB"), ("1x4GiB", "5xT4")],
)
def test_more_of_the_same_card_are_proposed_as_the_option_names_them(
    smollm: str, monkeypatch: pytest.MonkeyPatch, machines: str, suggested: str
) -> None:
    ranks_of(1, monkeypatch)
    config = separate(smollm)
    config = replace(config, rollout=replace(config.rollout, num_replicas=3))
    short = checked(config, machines)
    assert f" {suggested}." in short.advice
    assert checked(config, suggested).fits


def test_a_replica_of_sixteen_gpus_needs_a_node_of_sixteen(
    smollm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layouts of docs/cluster.md on two nodes: ranks may be on both, a replica is on one."""
    ranks_of(1, monkeypatch)
    trainer = TrainerConfig(layout="dp8", num_gpus=1)
    rollout = RolloutConfig(engine="vllm", num_gpus=8, tensor_parallel=8)
    config = GRPOConfig(
        model=ModelConfig(path=smollm), trainer=trainer, rollout=rollout, prompts_per_step=16
    )
    assert not checked(config, "8xH100").fits
    assert checked(config, "2x8xH100").fits
    assert checked(config, "16xH100").fits
    whole = replace(config, rollout=replace(rollout, num_gpus=16, tensor_parallel=16))
    assert not checked(whole, "3x8xH100").fits
    assert checked(whole, "2x16xH100").fits


@pytest.mark.slow
def test_a_dry_run_ends_with_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry(quickstart(tmp_path))
    assert "# verdict: fits\n" in capsys.readouterr().out
    with invalid("run") as found:
        dry(quickstart(tmp_path, rollout=RolloutConfig(kv_cache_gib=1e-5)))
    assert "rollout.kv_cache_gib=1e-05" in found.value.rule
    assert "# verdict: does not fit" in capsys.readouterr().out
    with invalid("run") as found:
        dry(quickstart(tmp_path, trainer=TrainerConfig(num_gpus=1)))
    assert "GPU" in found.value.rule
    dry(quickstart(tmp_path, trainer=TrainerConfig(num_gpus=1)), "1xH100")
    rollout = RolloutConfig(num_cpus=10_000)
    with invalid("run") as found:
        dry(quickstart(tmp_path, rollout=rollout))
    assert " 10001 CPUs" in found.value.rule
    assert "rollout.num_cpus=1." in found.value.fix
    dry(quickstart(tmp_path, rollout=rollout, trainer=TrainerConfig(num_gpus=1)), "1xH100")
    assert [*tmp_path.iterdir()] == []


def test_a_start_rejects_the_same_before_it_makes_a_directory(tmp_path: Path) -> None:
    with invalid("run") as found:
        arithmetic.run(quickstart(tmp_path, rollout=RolloutConfig(kv_cache_gib=1e-5)), grpo)
    assert "rollout.kv_cache_gib=1e-05" in found.value.rule
    with invalid("run") as found:
        arithmetic.run(quickstart(tmp_path, trainer=TrainerConfig(num_gpus=1)), grpo)
    assert "GPU" in found.value.rule
    assert not (tmp_path / "runs" / "quickstart").exists()


@pytest.mark.parametrize("host_gib", rest_slow([1000, 16]))
@pytest.mark.parametrize("cache_gib", rest_slow([1.0, 0.125]))
def test_a_proposal_leaves_no_shortage(
    host_gib: int, cache_gib: float, smollm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two CPUs hold reservations of eight: a rank and seven replicas. 16 GiB hold fewer.
    monkeypatch.setattr("actors.run.capacity.get_num_cpus", lambda: 2)
    config = GRPOConfig(
        model=ModelConfig(path=smollm),
        rollout=RolloutConfig(num_replicas=50, kv_cache_gib=cache_gib),
        trainer=TrainerConfig(micro_batch_tokens=2048),
    )
    flow: rlsys.Dataflow = grpo(config, [lambda rollout: 1.0])
    shape = model_shape(smollm)
    machine = Machine(name="small", devices=(), num_cpus=2, host_bytes=host_gib * GIB)
    short = check_run(config, flow, shape, [machine])
    assert " 51 CPUs (trainer-0 (1 CPU), 50 x rollout (1 CPU))" in short.verdict
    number = re.search(r"rollout.num_replicas=(\d+)\.$", short.advice)
    assert number is not None
    most = int(number[1])
    assert most == 7 if host_gib == 1000 else 1 <= most < 7
    for count in (most, most + 1):
        rollout = replace(config.rollout, num_replicas=count)
        changed = check_run(replace(config, rollout=rollout), flow, shape, [machine])
        assert changed.fits == (count == most)


def test_an_unwritable_directory_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions do not bind root, so the kernel's answer is faked.
    assert unwritable(tmp_path) == ""
    assert [*tmp_path.iterdir()] == []

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    assert unwritable(tmp_path) == os.strerror(errno.EROFS)


@pytest.mark.slow
def test_a_disk_that_is_too_small_is_rejected(smollm: str, tmp_path: Path) -> None:
    config = GRPOConfig(model=ModelConfig(path=smollm), runs_dir=str(tmp_path / "no" / "such"))
    flow: rlsys.Dataflow = grpo(config, [lambda rollout: 1.0])
    machine = Machine(name="this machine", devices=())
    shape = model_shape(smollm)
    data = replace(config, data=DataConfig(max_prompt_tokens=16), sampling=SamplingConfig())
    found = check_run(data, flow, shape, [machine], disk_bytes=10**18)
    assert any("runs_dir" in one.message for one in found.shortages)
    assert check_run(data, flow, shape, [machine], disk_bytes=1).fits
