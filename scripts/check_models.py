"""Check models against transformers' eager attention in the trainer and the torch engine.

    python scripts/check_models.py                 # every class for causal language modelling that
                                                   # transformers maps; writes docs/models.md
    python scripts/check_models.py llama gpt_oss   # some of them, in their rows of the page

Models are small and random (small_models.py), and rows exceed all their windows, chunks and limits.
The trainer gets rows of mixed lengths, packed if it packs; pairs of them share a prefix, which it
stores once if it shares prefixes. The torch engine samples completions in one batch and reports
their log-probabilities. Both are compared with each row alone.

The last line is JSON: the numbers of models that are `equal` in both engines, `refused` by one or
both with a message, `wrong`, and `trainer_only`: refused ones that are equal in the trainer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlsys.algorithms.aggregation import token_mean
from rlsys.algorithms.losses import clipped_surrogate
from rlsys.config import ModelConfig, TrainerConfig
from rlsys.engines.generation.torch.continuous_batch import ContinuousBatch
from rlsys.engines.models.attention_context import context_length, row_limit
from rlsys.engines.models.causal_lm import hide_progress_bars, load_causal_lm
from rlsys.engines.models.collate import collate
from rlsys.engines.models.rms_norm import use_fast_norms
from rlsys.engines.models.token_policy import TokenPolicy
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.types import GenerationRequest, SamplingParams, TrainRow
from scripts.small_models import build, names

TABLE = ("| Model type | Class | Trainer | Torch engine | |", "|---|---|---|---|---|")
COUNTS = "**The count**:"  # start of the paragraph before the table; both are replaced
PAGE = Path(__file__).parents[1] / "docs" / "models.md"

TOLERANCE = 1e-4  # nats, and share of log-probabilities beyond 1 nat
# Relative to the largest gradient. Float32 rounding gives 3e-4 in recurrent states. With a sparse
# activation (Gemma 3n) a unit at its threshold is on in one model and off in the other: 1.1e-3.
GRADIENT_TOLERANCE = 2e-3

# (prompt, completion): one row beyond every window and limit, and short rows.
ROWS = ((4, 26), (1, 3), (9, 1), (5, 8))
LONGEST = max(map(sum, ROWS))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of one engine for one model."""

    result: str  # equal, refused, wrong
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of both engines for one model."""

    name: str
    kind: str  # the class
    trainer: Verdict
    engine: Verdict

    @property
    def result(self) -> str:
        """Return the worst result of both engines."""
        results = {self.trainer.result, self.engine.result}
        return next(one for one in ("wrong", "refused", "equal") if one in results)


def check(name: str) -> Outcome:
    """Build the model of this name and run it through both engines."""
    try:
        model, config = build(name)
    except Exception as error:  # noqa: BLE001 - reported: transformers itself cannot build or run it
        unbuilt = Verdict(result="refused", remark=_not_by_transformers("build and run", error))
        return Outcome(name=name, kind="", trainer=unbuilt, engine=unbuilt)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        kind = type(model).__name__
        try:
            model.save_pretrained(path)
            config.save_pretrained(path)
        except Exception as error:  # noqa: BLE001 - as above
            unsaved = Verdict(result="refused", remark=_not_by_transformers("save", error))
            return Outcome(name=name, kind=kind, trainer=unsaved, engine=unsaved)
        return Outcome(
            name=name,
            kind=kind,
            trainer=_verdict(lambda: _check_trainer(path, model)),
            engine=_verdict(lambda: _check_engine(path, model)),
        )


def _verdict(compare: Any) -> Verdict:
    """Return the verdict; `compare` returns a remark about an equal model, or raises."""
    try:
        return Verdict(result="equal", remark=compare())
    except ValueError as error:
        return Verdict(result="refused", remark=_sentence(error))
    except Exception as error:  # noqa: BLE001 - reported as wrong
        return Verdict(result="wrong", remark=f"{type(error).__name__}: {_sentence(error)}")


def _not_by_transformers(what: str, error: Exception) -> str:
    return (
        f"transformers itself cannot {what} a small model of this type's default configuration "
        f"({type(error).__name__}: {_sentence(error)})"
    )


def _sentence(error: Exception) -> str:
    """Return the message on one line, shortened if it lists all classes of transformers."""
    text = " ".join(str(error).split())
    return text if len(text) < 400 else text[:300] + " ..."


def _check_trainer(path: Path, model: Any) -> str:
    limit = row_limit(model.config)
    rows = _with_forks(_rows(model, limit or LONGEST))
    engine = FSDPEngine(
        model_path=path,
        trainer=TrainerConfig(),
        model=ModelConfig(),
        loss=clipped_surrogate(0.2, 0.28),
        aggregation=token_mean,
        temperature=1.0,
        num_total_steps=1,
        seed=0,
    )
    try:
        found = engine.infer(rows)
        for row, logprobs in zip(rows, found, strict=True):
            _compare(torch.from_numpy(logprobs), _expected(model, row), "log-probabilities")
        remark = _check_gradients(path, model, rows)
        if limit is None:
            return remark
        try:
            engine.infer(_rows(model, limit + 2))  # the last is no input
        except ValueError:
            return f"{remark}; rows beyond {limit} tokens are refused"
        raise AssertionError(f"rows of more than {limit} tokens are not refused")
    finally:
        engine.close()


def _check_gradients(path: Path, model: Any, rows: Sequence[TrainRow]) -> str:
    ours = load_causal_lm(path, dtype="float32")
    use_fast_norms(ours)
    policy = TokenPolicy(ours)
    logprobs, _, _ = policy(collate(rows, packed=policy.packs, shares=policy.shares), 1.0)
    logprobs.sum().backward()
    model.zero_grad()
    torch.stack([_expected(model, row).sum() for row in rows]).sum().backward()
    scale = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    theirs = dict(model.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.grad is not None:
            gradients = parameter.grad / scale, theirs[name].grad / scale
            _compare(*gradients, f"the gradients of {name}", GRADIENT_TOLERANCE)
    if policy.packs:
        return "packed" if policy.shares else "packed apart"
    return "padded"


def _check_engine(path: Path, model: Any) -> str:
    ours = load_causal_lm(path, dtype="float32")
    batch = ContinuousBatch(
        ours, max_running=8, kv_cache_gib=0.05, stop_token_ids=(), decode_text=lambda _: ""
    )
    context = context_length(model.config)
    rows = _rows(model, min(context, LONGEST))
    requests = [
        GenerationRequest(
            request_id=str(number),
            prompt_token_ids=tuple(row.prompt_token_ids.tolist()),
            sampling=SamplingParams(max_tokens=len(row.token_ids)),
            seed=number,
            num_prior_tokens=0,
        )
        # Two samples of each prompt share its prefill.
        for number, row in enumerate(itertools.chain(rows, rows))
    ]
    for request in requests:
        batch.check(request)
    batch.submit(requests)
    prompts = {request.request_id: request.prompt_token_ids for request in requests}
    ended = []
    while batch.has_work:
        ended += batch.step()
    for one in ended:
        prompt = np.array(prompts[one.request_id], np.int32)
        row = _row(prompt, np.asarray(one.token_ids))
        _compare(torch.from_numpy(one.sampler_logprobs), _expected(model, row), "log-probabilities")
    return ""


def _rows(model: Any, longest: int) -> list[TrainRow]:
    """Return rows of random tokens; the longest one has `longest` tokens."""
    rng = np.random.default_rng(0)
    vocabulary = min(model.config.get_text_config().vocab_size, 64)
    rows = []
    for num_prompt, num_tokens in ROWS:
        num_tokens = longest - num_prompt if num_prompt + num_tokens == LONGEST else num_tokens
        tokens = rng.integers(0, vocabulary, num_prompt + num_tokens).astype(np.int32)
        rows.append(_row(tokens[:num_prompt], tokens[num_prompt:]))
    return rows


def _with_forks(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Return the rows, and for each another one with its prompt and half of its completion."""
    forks = []
    for row in rows:
        half = len(row.token_ids) // 2
        forks.append(_row(row.prompt_token_ids, np.roll(row.token_ids, -half)))
        forks[-1].token_ids[:half] = row.token_ids[:half]
    return [*rows, *forks]


def _row(prompt: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any]) -> TrainRow:
    count = len(tokens)
    return TrainRow(
        prompt_token_ids=prompt.astype(np.int32),
        token_ids=tokens.astype(np.int32),
        policy_versions=np.zeros(count, np.int32),
        loss_mask=np.ones(count, np.bool_),
        columns={},
        group_id=0,
        group_size=1,
        group_num_tokens=count,
    )


def _plain_logprobs(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=token_ids[None], use_cache=False).logits[0]
    logprobs: torch.Tensor = logits.float().log_softmax(-1)  # [T, V]
    return logprobs


def _expected(model: Any, row: TrainRow) -> torch.Tensor:
    """Return the log-probabilities of the completion's tokens in the row alone."""
    tokens = torch.from_numpy(np.concatenate((row.prompt_token_ids, row.token_ids))).long()
    first = len(row.prompt_token_ids)
    logprobs = _plain_logprobs(model, tokens[:-1])[first - 1 :]
    return logprobs.gather(1, tokens[first:, None])[:, 0]


def _compare(
    found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = TOLERANCE
) -> None:
    gap = float((found - expected).detach().abs().nan_to_num(nan=torch.inf).max())
    scale = max(1.0, float(expected.detach().abs().max()))
    assert gap <= tolerance * scale, f"{what} differ by {gap:.1g}"


def row(one: Outcome) -> str:
    """Return a row of the Markdown table."""
    verdicts = (one.trainer, one.engine)
    cells = [one.name, one.kind]
    cells += [
        f"{v.result}, {v.remark}" if v.result == "equal" and v.remark else v.result
        for v in verdicts
    ]
    why = [v.remark.replace("|", "\\|") for v in verdicts if v.result != "equal"]
    return "".join(f"| {cell} " for cell in [*cells, *why[:1]]) + ("|" if why else "| |")


def read_page(page: Path = PAGE) -> dict[str, Outcome]:
    """Return the outcomes in the table of the page, by name."""
    rows = (
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in page.read_text().splitlines()
        if line.startswith("| ") and line != TABLE[0]
    )
    found = {}
    for name, kind, *cells, why in rows:
        why = why.replace("\\|", "|")
        parts = [cell.partition(", ") for cell in cells]
        trainer, engine = (
            Verdict(result=result, remark=remark if result == "equal" else why)
            for result, _, remark in parts
        )
        found[name] = Outcome(name=name, kind=kind, trainer=trainer, engine=engine)
    return found


def write_page(outcomes: Iterable[Outcome], page: Path = PAGE) -> None:
    """Put outcomes into the table, count again, and drop rows of models that do not exist."""
    all_rows = read_page(page) | {one.name: one for one in outcomes}
    kept = [all_rows[name] for name in names() if name in all_rows]
    head = page.read_text().partition(COUNTS)[0]
    lines = [in_words(summary(kept)), "", *TABLE, *map(row, kept)]
    page.write_text(head + "\n".join(lines) + "\n")


def summary(outcomes: Collection[Outcome]) -> dict[str, int]:
    """Return the counts; equal, refused and wrong add up to all."""
    results = Counter(one.result for one in outcomes)
    return {
        "equal": results["equal"],
        "refused": results["refused"],
        "wrong": results["wrong"],
        "trainer_only": sum(
            one.result == "refused" and one.trainer.result == "equal" for one in outcomes
        ),
        "models": len(outcomes),
    }


def in_words(counts: Mapping[str, int]) -> str:
    """Return the sentence with the counts."""
    return (
        f"{COUNTS} of {counts['models']} models {counts['equal']} are equal in both engines, "
        f"{counts['refused']} are\nrefused by one or both ({counts['trainer_only']} of them by the "
        f"torch engine alone: trainer only), {counts['wrong']} are wrong."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the models and return 1 if one is wrong, else 0."""
    from transformers import logging

    parser = argparse.ArgumentParser(description="Check models against transformers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="model types; default: all")
    chosen = parser.parse_args(arguments).names
    if unknown := set(chosen) - set(names()):
        parser.error(f"{sorted(unknown)} are not model types. Use some of {', '.join(names())}")
    logging.set_verbosity_error()
    hide_progress_bars()
    outcomes = []
    for name in chosen or names():
        outcomes.append(check(name))
        print(row(outcomes[-1]), flush=True)
    write_page(outcomes)
    counts = summary(outcomes)
    print(json.dumps(counts))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
