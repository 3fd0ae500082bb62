"""Models that play seats: their resources, and the checks before Ray starts."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoTokenizer

import rlsys
from actors.cluster.placement import ClusterTooSmall, check_capacity
from actors.environment.episode_replica import EpisodeReplica
from actors.run import factories
from actors.run.demands import LIBRARIES_BYTES, demands
from rlsys.algorithms import clipped_surrogate, token_mean, turn_advantage
from rlsys.config import (
    DataConfig,
    FrozenModelConfig,
    ModelConfig,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainedRoleConfig,
    TrainerConfig,
)
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.controller.worker_protocols import WeightsGone
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.run_graph import complete_graph
from rlsys.dataflow.graph.stages import Model, Prompts
from rlsys.engines.models.model_shape import model_shape
from rlsys.launcher.memory_estimate import partner_bytes, partner_published_bytes
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.types import WeightManifest


@rlsys.tool
def search(query: str) -> str:
    """Find pages.

    Args:
        query: What to look for.
    """
    return query


@rlsys.environment(seats=("first", "second", "third"))
async def game(chat: Any, task: Any) -> float:
    return float(await chat("1"))


def graph(
    config: RunConfig,
    frozen: RoleConfig,
    rival: TrainedRoleConfig | None = None,
    environment: Any = game,
) -> Dataflow:
    flow = Dataflow()
    policy = flow.model("policy")
    seats = {"third": flow.model("frozen", frozen)}
    if rival is not None:
        seats["second"] = flow.model("rival", rival)
    tasks = Prompts(config=config.data, rows=[{"number": n} for n in range(8)])
    size = config.group_size
    episodes = flow.play(policy, environment, tasks, group_size=size, seats=seats)
    (advantages,) = flow.per_batch(
        turn_advantage, episodes.turn_rewards, episodes.turns, per="token"
    )
    for model in (policy, *(one for one in seats.values() if one.may_train)):
        flow.train(
            model,
            episodes.rollouts,
            advantages,
            loss=clipped_surrogate(),
            aggregation=token_mean,
        )
    return flow


def test_each_replica_has_engines_of_its_partners() -> None:
    config = RunConfig(rollout=RolloutConfig(num_replicas=2, num_cpus=2, num_gpus=1))
    frozen = RoleConfig(num_cpus=0.5, num_gpus=1)
    rival = TrainedRoleConfig(trainer=TrainerConfig(layout="dp2", num_cpus=3))
    flow = graph(config, frozen, rival)
    _, replicas = factories.needs(config, flow)
    assert [[str(one) for one in replica.partners] for replica in replicas] == [
        ["frozen-rollout-0 (0.5 CPU, 1 GPU)", "rival-rollout-0 (2 CPU, 1 GPU)"],
        ["frozen-rollout-1 (0.5 CPU, 1 GPU)", "rival-rollout-1 (2 CPU, 1 GPU)"],
    ]
    roles = factories.role_needs(config, flow)
    assert {name: [str(one) for one in some] for name, some in roles.items()} == {
        "rival": ["rival-0 (3 CPU)", "rival-1 (3 CPU)"]
    }
    first = [replicas[0], *replicas[0].partners]
    check_capacity(first, [{"CPU": 4.5, "GPU": 3.0}])
    with pytest.raises(ClusterTooSmall) as error:
        check_capacity(first, [{"CPU": 4.5, "GPU": 2.0}])
    assert "rollout.num_replicas" in error.value.fix


LORA = ModelConfig(path="base", lora="r8")
ADAPTED = RolloutConfig(engine="vllm", vllm={"enable_lora": True}, num_replicas=2)


def test_a_policy_that_the_replicas_serve_reserves_nothing() -> None:
    config = RunConfig(model=LORA, rollout=ADAPTED, group_size=2)
    rival = TrainedRoleConfig(model=ModelConfig(lora="r4"))
    run_graph = complete_graph(graph(config, RoleConfig(), rival), config)
    _, replicas = factories.needs(config, run_graph)
    assert [[one.name for one in replica.partners] for replica in replicas] == [
        ["frozen-rollout-0"],
        ["frozen-rollout-1"],
    ]


def test_a_policy_without_adapters_has_an_engine_with_whole_weights(tmp_path: Path) -> None:
    """The other policy of the environment has adapters, which vLLM gets unmerged."""
    path = str(build_tiny_model(tmp_path / "m", seed=0))
    adapted = ModelConfig(path=path, lora="r8")
    config = RunConfig(model=adapted, rollout=ADAPTED, group_size=2)
    rivals = (ModelConfig(path=path), ModelConfig(path=path, lora="r8", dtype="bfloat16"))
    published, engines = [], []
    for model in rivals:
        flow = graph(config, RoleConfig(), TrainedRoleConfig(model=model))
        (rival,) = (one for one in flow.partners if one.name == "rival")
        published.append(partner_published_bytes(config, rival))
        engines.append(partner_bytes(config, rival))
    assert published[0] > 5 * published[1] > 0  # whole weights, and adapters
    assert min(engines) > 0


class Sampling:
    """The part of a RayReplica that loads weights."""

    def __init__(self, seconds: float, death: Exception | None = None) -> None:
        self.seconds, self.death = seconds, death
        self.begun: list[WeightManifest] = []
        self.num_ended = 0

    async def update_weights(self, manifest: WeightManifest, *, delayed: bool) -> float:
        self.begun.append(manifest)
        await asyncio.sleep(self.seconds)
        self.num_ended += 1
        if self.death is not None:
            raise self.death
        return self.seconds


def playing(replica: Any, partners: Any) -> EpisodeReplica:
    return EpisodeReplica(
        replica,
        lambda name: pytest.fail("no worker starts"),
        game,
        cast(Any, None),
        num_workers=1,
        start_timeout_s=1.0,
        on_death=pytest.fail,
        partners=partners,
    )


def test_each_model_gets_its_own_weights_and_a_frozen_one_none() -> None:
    own, rival, frozen = Sampling(1.0), Sampling(3.0), Sampling(9.0)
    replica = playing(own, {"frozen": frozen, "rival": rival})
    of_rival = WeightManifest(version=7)
    manifest = WeightManifest(version=7, others=(("rival", of_rival),))
    assert run_in_virtual_time(replica.update_weights(manifest, delayed=False)) == 3.0
    assert own.begun == [WeightManifest(version=7)]
    assert rival.begun == [of_rival]
    assert frozen.begun == []


def test_missing_weights_are_an_error_after_all_engines_have_loaded() -> None:
    gone = WeightsGone("a newer version is there")
    own, rival = Sampling(1.0, gone), Sampling(3.0)
    replica = playing(own, {"rival": rival})
    manifest = WeightManifest(version=7, others=(("rival", WeightManifest(version=7)),))

    async def load() -> None:
        with pytest.raises(WeightsGone) as error:
            await replica.update_weights(manifest, delayed=False)
        assert error.value is gone
        assert rival.num_ended == 1

    run_in_virtual_time(load())


def launched(tmp_path: Path, make: Any = graph, **changes: Any) -> None:
    """Make a dry run of a policy in tmp_path/policy."""
    config = RunConfig(
        name="seats",
        runs_dir=str(tmp_path / "runs"),
        model=ModelConfig(path=str(tmp_path / "policy")),
        data=DataConfig(max_prompt_tokens=64),
        sampling=SamplingConfig(max_tokens=64),
        group_size=2,
        prompts_per_step=2,
        trainer=TrainerConfig(micro_batch_tokens=256),
    )
    config = dataclasses.replace(config, **changes)
    rlsys.launch(config, make(config), dry_run=True)


@pytest.fixture(autouse=True)
def policy(tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "policy", width=32, num_layers=2)


def test_a_dry_run_counts_partners(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = build_tiny_model(
        tmp_path / "other", characters="ab=", width=64, num_layers=2, max_context=256
    )
    frozen = RoleConfig(model=FrozenModelConfig(path=str(other)), pass_tokens=1024)
    launched(tmp_path, lambda config: graph(config, frozen, TrainedRoleConfig()))
    printed = capsys.readouterr().out
    lines = {
        line.removeprefix("# ").strip().split("  ")[0]: line
        for line in printed.splitlines()
        if "MiB" in line
    }
    assert "KV cache" in lines["frozen engine"]
    assert "KV cache" in lines["rival engine"]
    # 1.5 * 1024 places of 2 layers, 2 heads of 32, keys and values, 4 bytes each: 1.5 MiB.
    assert 1.5 < float(lines["frozen engine"].split()[3]) < 2.5
    assert "at most two versions" in lines["published"]
    assert "# frozen-rollout-0 (1 CPU)\n" in printed
    assert "# rival-rollout-0 (1 CPU)\n" in printed


def test_a_dry_run_counts_one_engine_of_policies_with_adapters(
    policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rival = TrainedRoleConfig(model=ModelConfig(lora="r4"))
    model = dataclasses.replace(LORA, path=str(policy))
    launched(
        policy.parent,
        lambda config: graph(config, RoleConfig(), rival),
        model=model,
        rollout=dataclasses.replace(ADAPTED, kv_cache_gib=0.25),
    )
    printed = capsys.readouterr().out
    assert "# frozen-rollout-0 (1 CPU)\n" in printed
    assert "rival-rollout-0" not in printed
    (engine,) = [line for line in printed.splitlines() if line.startswith("# rival engine")]
    assert "none" in engine

    config = RunConfig(model=model, rollout=ADAPTED, group_size=2)
    shape = model_shape(str(policy))

    def num_bytes(*, warm_starts: bool) -> int:
        flow = complete_graph(graph(config, RoleConfig(), rival), config, warm_starts=warm_starts)
        return sum(one.host_bytes for one in demands(config, flow, shape))

    # With a warm start, each of the two replicas has an engine of the rival next to it.
    more = partner_bytes(config, Model(name="rival", config=rival)) + LIBRARIES_BYTES
    assert num_bytes(warm_starts=True) - num_bytes(warm_starts=False) == 2 * more


@pytest.mark.parametrize(
    ("template", "plain_text", "expected"),
    [
        ("{{ messages }}", False, "formatted .*chat template"),
        ("{{ messages }}", True, "concatenated .*plain_text=True"),
        (None, False, "concatenated .*no chat template"),
    ],
)
def test_a_dry_run_shows_the_format_of_turns(
    policy: Path,
    capsys: pytest.CaptureFixture[str],
    template: str | None,
    plain_text: bool,
    expected: str,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = template
    (policy / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(policy)
    alone = dataclasses.replace(game, plain_text=plain_text)
    launched(policy.parent, lambda config: graph(config, RoleConfig(), environment=alone))
    assert re.search(f"^# turns: {expected}", capsys.readouterr().out, re.MULTILINE)


def rejected(tmp_path: Path, words: str, make: Any, **changes: Any) -> None:
    """Assert that a dry run is rejected with a message that contains all words."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - checked below
        launched(tmp_path, make, **changes)
    for word in words.split():
        assert word in str(error.value)


def test_a_model_without_room_for_a_conversation_is_rejected(tmp_path: Path) -> None:
    rejected(
        tmp_path,
        "100 frozen pass_tokens",
        lambda config: graph(config, RoleConfig(pass_tokens=100)),
    )
    other = build_tiny_model(tmp_path / "other", width=32, num_layers=2, max_context=100)
    role = RoleConfig(model=FrozenModelConfig(path=str(other)))
    rejected(tmp_path, "100 frozen context", lambda c: graph(c, role))


def test_a_path_without_a_model_is_rejected(tmp_path: Path) -> None:
    role = RoleConfig(model=FrozenModelConfig(path=str(tmp_path)))
    rejected(tmp_path, "frozen.model.path", lambda config: graph(config, role))


def test_a_policy_with_another_vocabulary_is_rejected(tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", characters="ab=", width=32, num_layers=2)
    rival = TrainedRoleConfig(model=ModelConfig(path=str(other)))
    rejected(
        tmp_path, "rival.model.path vocabulary", lambda config: graph(config, RoleConfig(), rival)
    )


def test_a_policy_that_its_engines_cannot_quantize_is_rejected(tmp_path: Path) -> None:
    # The error names the rival, whose precision differs from the policy's.
    rejected(
        tmp_path,
        "rollout.quantization fp8_per_channel rival.model.dtype float32",
        lambda config: graph(config, RoleConfig(), TrainedRoleConfig()),
        model=ModelConfig(path=str(tmp_path / "policy"), dtype="bfloat16"),
        rollout=RolloutConfig(engine="vllm", quantization="fp8_per_channel"),
    )


def test_colocated_placement_and_partners_exclude_each_other(tmp_path: Path) -> None:
    rejected(
        tmp_path,
        "placement colocated frozen",
        lambda config: graph(config, RoleConfig()),
        placement="colocated",
    )


def test_episodes_cannot_move_to_borrowed_replicas(tmp_path: Path) -> None:
    rejected(
        tmp_path,
        "rollout.borrow 1",
        lambda config: graph(config, RoleConfig()),
        rollout=RolloutConfig(borrow=1),
    )


def test_evaluation_against_partners_is_rejected(tmp_path: Path) -> None:
    rejected(
        tmp_path,
        "evaluation.every policy game third",
        lambda config: graph(config, RoleConfig()),
        evaluation=dataclasses.replace(RunConfig().evaluation, every=2),
    )


def test_an_environment_with_tools_requires_the_same_chat_template(tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", width=32, num_layers=2)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (other / "chat_template.jinja").write_text(template)

    @rlsys.environment(seats=("first", "third"), tools=[search], tool_format="json")
    async def with_tools(chat: Any, task: Any) -> float:
        return float(await chat.until_answer("1"))

    role = RoleConfig(model=FrozenModelConfig(path=str(other)))
    rejected(
        tmp_path,
        "template with_tools tools",
        lambda config: graph(config, role, environment=with_tools),
    )
