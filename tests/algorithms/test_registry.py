import functools
import inspect
import math
import pickle
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import rlsys.algorithms
from rlsys.algorithms import advantages, group_functions, losses
from rlsys.algorithms.composed import corrected, with_kl
from rlsys.algorithms.corrections import tis
from rlsys.algorithms.loss_inputs import LossInputs, ScoreInputs, ValueInputs, needs_of
from rlsys.algorithms.losses import cispo, clipped_surrogate, gspo
from rlsys.algorithms.registry import REGISTRY, Kind, names, parse, tables
from tests.algorithms.examples import LOSSES, OTHERS, WIDE_LOSSES
from tests.errors import invalid

ROOT = Path(__file__).parents[2]
EXAMPLES: list[tuple[Any, str]] = [("loss", text) for text in (*LOSSES, *WIDE_LOSSES)]
EXAMPLES += [(kind, text) for kind, texts in OTHERS.items() for text in texts]


def test_names_with_and_without_arguments() -> None:
    assert parse("gspo", "loss") == gspo()
    assert parse(" gspo() ", "loss") == gspo(3e-4, 4e-4)
    assert parse("clipped_surrogate(0.2, 0.28)", "loss") == clipped_surrogate(0.2, 0.28)
    assert parse("cispo(max_ratio=4)", "loss") == cispo(4)
    assert parse("clipped_surrogate(dual_clip=None)", "loss") == clipped_surrogate()
    text = (
        "with_kl(corrected(clipped_surrogate(0.2, 0.28, denominator='proximal'), tis), 'k3', 1e-3)"
    )
    clipped = clipped_surrogate(0.2, 0.28, denominator="proximal")
    assert parse(text, "loss") == with_kl(corrected(clipped, tis(2.0)), "k3", 1e-3)
    assert parse("grpo_advantage", "group_advantage") is advantages.grpo_advantage
    partial = parse("grpo_advantage(epsilon=0.5)", "group_advantage")
    assert isinstance(partial, functools.partial)
    assert group_functions.min_group_size(partial) == 2


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_named_objects_can_be_pickled(kind: Kind, text: str) -> None:
    made = parse(text, kind)
    again = pickle.loads(pickle.dumps(made))
    if not isinstance(made, functools.partial):
        assert again == made


def test_every_name_has_an_example() -> None:
    used = {word for _, text in EXAMPLES for word in re.findall(r"\w+", text)}
    assert set(REGISTRY) <= used


# Arguments that do not fit the signature, and text that is not a registered name of that kind.
MALFORMED: list[tuple[str, Kind]] = [
    ("gspo(clip_low=0.1, clip_low=0.2)", "loss"),
    ("grpo_advantage(1e-4)", "group_advantage"),
    ("token_mean(1)", "aggregation"),
    ("nothing_like_it", "loss"),
    ("tis", "loss"),
    ("corrected(reinforce)", "loss"),
    ("aipo", "loss"),
    ("gspo(clip=1)", "loss"),
    ("cispo(**{})", "loss"),
    ("gae(loss_mask=None)", "token_advantage"),
    ("__import__('os').system('true')", "loss"),
    ("(lambda: 0)()", "loss"),
    ("cispo(", "loss"),
    ("cispo; cispo", "loss"),
    ("", "loss"),
    ("(" * 5000, "loss"),
    ("corrected(tis, reinforce)", "loss"),
]


@pytest.mark.parametrize(("text", "kind"), MALFORMED)
def test_malformed_text_is_refused(text: str, kind: Kind) -> None:
    with invalid(repr(text)) as error:
        parse(text, kind)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "kind", "field", "value"),
    [
        ("grpo_advantage(epsilon=1e308)", "group_advantage", "grpo_advantage: epsilon", 1e308),
        (
            "interpolate_proximal(clipped_surrogate())",
            "loss",
            "interpolate_proximal: loss",
            clipped_surrogate(),
        ),
        ("high_entropy(inf)", "correction", "high_entropy: min_entropy", math.inf),
        ("cispo('5')", "loss", "cispo: max_ratio", "5"),
        ("cispo(True)", "loss", "cispo: max_ratio", True),
        ("cispo(0)", "loss", "cispo: max_ratio", 0),
        ("cispo(2**99)", "loss", "cispo: max_ratio", "2 ** 99"),
        ("cispo(__import__('os'))", "loss", "cispo: max_ratio", "__import__('os')"),
        (
            "clipped_surrogate(denominator='ref')",
            "loss",
            "clipped_surrogate: denominator",
            "ref",
        ),
        ("constant_length(1.5)", "aggregation", "constant_length: length", 1.5),
    ],
)
def test_a_wrong_argument_is_refused_by_name(text: str, kind: Kind, field: str, value: Any) -> None:
    with invalid(f"{text!r}: {field}", value):
        parse(text, kind)


def test_an_unknown_name_is_refused_with_the_closest_one() -> None:
    with invalid("'gpso'") as error:
        parse("gpso", "loss")
    assert "'gspo'" in error.value.fix
    assert "reinforce" in error.value.fix


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    kind: Any = "lss"
    with invalid("kind", "lss") as error:
        parse("grpo_advantage", kind)
    assert "loss, correction" in error.value.fix


def test_every_function_is_registered_or_used_by_one_that_is() -> None:
    sources = {path: path.read_text() for path in (ROOT / "rlsys").rglob("*.py")}
    unreached = []
    for name in rlsys.algorithms.__all__:
        if name in REGISTRY:
            continue
        module = getattr(rlsys.algorithms, name).__module__.rpartition(".")[2]
        uses = [
            path
            for path, text in sources.items()
            if path.name not in ("__init__.py", f"{module}.py") and re.search(rf"\b{name}\b", text)
        ]
        if not uses:
            unreached.append(name)
    # Called by the code that runs the graph.
    assert set(unreached) <= {
        "ScoreInputs",
        "check_group_size",
        "derived_metrics",
        "min_group_size",
        "needs_of",
        "unbiased_k3",
        "uses_advantages",
        "whole_groups",
    }


# An arXiv id, authors with a year, or a definition without a source.
SOURCE = re.compile(
    r"\b\d{4}\.\d{5}\b|\b[A-Z][a-z]+( and [A-Z][a-z]+| et al\.)? \(\d{4}\)|the definition itself"
)


@pytest.mark.parametrize("name", [*REGISTRY, "k1", "k2", "k3", "unbiased_k3"])
def test_the_first_paragraph_of_each_docstring_names_the_source(name: str) -> None:
    first, *_ = (inspect.getdoc(getattr(rlsys.algorithms, name)) or "").split("\n\n")
    assert SOURCE.search(" ".join(first.split()))


def test_the_users_loss_of_the_documentation() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    (block,) = re.findall(r"```python\n([^`]*class towards_reference.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    loss = corrected(names["towards_reference"](0.5), tis(2.0))
    assert needs_of(loss) == ("reference_logprobs",)
    inputs = LossInputs(
        trainer_logprobs=torch.tensor([-1.0]),
        proximal_logprobs=torch.tensor([-1.0]),
        sampler_logprobs=torch.tensor([-1.0]),
        advantages=torch.tensor([3.0]),
        entropy=torch.zeros(1),
        staleness=torch.zeros(1, dtype=torch.int64),
        row_index=torch.zeros(1, dtype=torch.int64),
        columns={"reference_logprobs": torch.tensor([-2.0])},
    )
    assert loss(inputs)[0].tolist() == [3.5]


@pytest.mark.parametrize("inputs", [LossInputs, ValueInputs, ScoreInputs])
def test_the_page_has_the_fields_of_inputs(inputs: type[Any]) -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    _, _, section = page.partition(f"`{inputs.__name__}` |")
    table, _, _ = section.partition("\n\n")
    assert re.findall(r"^\| `(\w+)", table, re.MULTILINE) == [one.name for one in fields(inputs)]


def test_the_page_has_the_tables() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert tables() in page, (
        "docs/algorithms.md is out of date; put the output of `python -m "
        "rlsys.algorithms.registry` below its heading."
    )
    assert set(names("loss")) >= {losses.gspo.__name__}
