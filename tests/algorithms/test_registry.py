import functools
import inspect
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
def test_what_is_named_travels(kind: Kind, text: str) -> None:
    made = parse(text, kind)
    again = pickle.loads(pickle.dumps(made))
    if not isinstance(made, functools.partial):
        assert again == made


def test_every_name_has_an_example() -> None:
    used = {word for _, text in EXAMPLES for word in re.findall(r"\w+", text)}
    assert set(REGISTRY) <= used


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("gspo(clip_low=0.1, clip_low=0.2)", "loss", r"gives clip_low twice; write gspo\(clip_lo"),
        (
            "grpo_advantage(1e-4)",
            "group_advantage",
            r"too many positional arguments; write grpo_advantage\(epsilon=",
        ),
        (
            "grpo_advantage(epsilon=1e308)",
            "group_advantage",
            r"epsilon=1e\+308 lies outside",
        ),
        ("token_mean(1)", "aggregation", r"too many positional arguments; write token_mean\(\)"),
        (
            "interpolate_proximal(clipped_surrogate())",
            "loss",
            r"would do nothing: the loss reads no proximal policy; give it one",
        ),
        (
            "corrected(cispo(), high_entropy(inf))",
            "loss",
            r"min_entropy=inf leaves all tokens out",
        ),
        (
            "gpso",
            "loss",
            r"'gpso': 'gpso' is unknown, where a loss .*did you mean 'gspo'\? Known: r",
        ),
        ("nothing_like_it", "loss", r"is unknown, where a loss is wanted; known: reinforce, "),
        ("tis", "loss", r"'tis' is a correction, where a loss is wanted"),
        ("corrected(tis, reinforce)", "loss", r"'tis' is a correction, where a loss is wanted"),
        ("corrected(reinforce)", "loss", r"missing .*'correction'; write corrected\(loss, corr"),
        ("aipo", "loss", r"missing .*'max_ratio'; write aipo\(max_ratio\)"),
        (
            "gspo(clip=1)",
            "loss",
            r"unexpected keyword argument 'clip'; write gspo\(clip_low=0.0003",
        ),
        ("cispo('5')", "loss", r"max_ratio='5' is no float; write cispo\(max_ratio=5.0"),
        ("cispo(True)", "loss", r"max_ratio=True is no float"),
        ("cispo(0)", "loss", r"'cispo\(0\)': max_ratio=0 stops every gradient"),
        ("cispo(2**99)", "loss", r"max_ratio=2 \*\* 99 is no float"),
        ("cispo(**{})", "loss", r"unexpected keyword argument '\*\*'"),
        ("clipped_surrogate(denominator='ref')", "loss", r"denominator='ref' names no policy"),
        ("constant_length(1.5)", "aggregation", r"length=1.5 is no int"),
        ("gae(loss_mask=None)", "token_advantage", r"unexpected keyword argument 'loss_mask'"),
        ("__import__('os').system('true')", "loss", r"is no name with arguments"),
        ("(lambda: 0)()", "loss", r"is no name with arguments"),
        ("cispo(", "loss", r"is no name with arguments"),
        ("cispo; cispo", "loss", r"is no name with arguments"),
        ("", "loss", r"'': it is no name with arguments, where a loss is wanted; known: "),
        ("(" * 5000, "loss", r"is no name with arguments"),
        ("cispo(__import__('os'))", "loss", r"max_ratio=__import__\('os'\) is no float"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(
    text: str, kind: Kind, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse(text, kind)
    assert "\n" not in str(caught.value)


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    kind: Any = "lss"
    with pytest.raises(ValueError, match=r"^kind='lss' is unknown; use one of loss, correction, "):
        parse("grpo_advantage", kind)


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
    # What whoever runs the graph asks of these functions and of a step.
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


# An arXiv id; an author, or several, with a year; or what is nobody's.
SOURCE = re.compile(
    r"\b\d{4}\.\d{5}\b|\b[A-Z][a-z]+( and [A-Z][a-z]+| et al\.)? \(\d{4}\)|the definition itself"
)


@pytest.mark.parametrize("name", [*REGISTRY, "k1", "k2", "k3", "unbiased_k3"])
def test_everything_says_where_it_is_from(name: str) -> None:
    """In the first paragraph, which the page's tables have too."""
    first, *_ = (inspect.getdoc(getattr(rlsys.algorithms, name)) or "").split("\n\n")
    assert SOURCE.search(" ".join(first.split()))


def test_a_loss_of_ones_own_as_the_page_shows_it() -> None:
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
