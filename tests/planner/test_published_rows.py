"""The published rows: their split, their conversion, and the errors of the stored constants."""

from __future__ import annotations

from collections import Counter

import pytest

from rlsys.planner.profiles import fitted_constants
from scripts.plan.decode_rows import decode_case, plan_of
from scripts.plan.memory_rows import memory_cases
from scripts.plan.published_rows import Case, Row, Skip, model_of, published, rows_of
from scripts.plan.training_rows import training_case, training_cases
from scripts.plan.validate import (
    Result,
    calibrated,
    constant_utilisation,
    errors_of,
    ordering,
    out_of_memory,
    predict_all,
)


def test_every_row_is_a_case_or_has_a_reason() -> None:
    found = list(training_cases())
    assert len(found) == len(rows_of("train_throughput")) == 580
    assert all(one.reason for one in found if isinstance(one, Skip))
    assert sum(isinstance(one, Case) for one in found) > 550


def test_a_group_is_fitted_or_reported_as_a_whole() -> None:
    sides: dict[str, set[bool]] = {}
    for case in training_cases():
        if isinstance(case, Case):
            sides.setdefault(case.group, set()).add(case.for_fitting)
    assert all(len(both) == 1 for both in sides.values())
    share = sum(both == {True} for both in sides.values()) / len(sides)
    assert 0.4 < share < 0.6


def test_rates_become_seconds_of_a_step() -> None:
    """5,762 tokens/s per GPU: 8 GPUs with 2 rows of 8,192 tokens each."""
    (row,) = (row for row in published()["rows"] if row["id"] == "r00060")
    case = training_case(row)
    assert isinstance(case, Case)
    assert case.measured == pytest.approx(2 * 8192 / 5762)
    assert case.kind == "dense"


def result(measured: float, predicted: float, **workload: object) -> Result:
    row = {
        "id": "x",
        "table": "t",
        "model": "m",
        "gpu": "H100",
        "num_gpus": 8,
        "precision": "bf16",
        "group": "g",
        "workload": workload,
    }
    case = Case(row, "dense", "fsdp", measured, lambda constants: predicted, baseline=1.0)
    return Result(case, predicted)


def test_degrees_that_a_table_multiplied_are_the_ranks_of_experts() -> None:
    """A row with tp=64, 8 groups of experts and 8 ranks each ran on 8 GPUs."""
    (row,) = (row for row in published()["rows"] if row["id"] == "r02180")
    plan = plan_of(row, model_of(row))
    assert (plan.tp, plan.ep, plan.attention_dp) == (8, 8, 1)


def generation_row(name: str) -> Row:
    (row,) = (row for row in rows_of("decode") if row["id"] == name)
    return row


def predicted(row: Row, **workload: float) -> float:
    """Return the predicted seconds of a token for a row with a changed workload."""
    case = decode_case({**row, "workload": {**row["workload"], **workload}})
    assert isinstance(case, Case)
    return case.predict(fitted_constants())


def test_checkpoints_of_modelopt_have_an_8_bit_cache_in_tensorrt_llm() -> None:
    for name, kv in (("r03317", "fp8"), ("r03339", "bf16"), ("r03129", "bf16")):
        row = generation_row(name)
        assert plan_of(row, model_of(row)).kv == kv


def test_rows_that_wait_for_room_do_not_delay_those_that_decode() -> None:
    """TensorRT-LLM holds a row back until its whole length fits, so its cache is the limit."""
    row = generation_row("r03317")  # 128 rows of 9,216 tokens on one H200
    full = predicted(row)
    assert predicted(row, concurrency=1024) == full
    assert predicted(row, concurrency=8) < full


def test_a_rate_counts_the_rows_that_wait() -> None:
    row = generation_row("r01745")  # a cache of 377,024 tokens, rows of 3,072 tokens on average
    many = predicted(row, concurrency=1220)
    assert predicted(row, concurrency=2440) == pytest.approx(2 * many)


def test_few_requests_do_not_reach_the_rate_of_many() -> None:
    row = generation_row("r01463")
    few, many, endless = (predicted(row, requests=count) for count in (3e3, 3e4, 3e7))
    assert few > many > endless


def test_errors_by_hand() -> None:
    errors = errors_of([0.1, 0.3, 0.2])
    assert (errors.rows, errors.mdape) == (3, 0.2)
    assert errors.within == pytest.approx(2 / 3)


def test_the_order_of_layouts_by_hand() -> None:
    found = ordering([result(1.0, 2.0), result(1.2, 1.0), result(2.0, 3.0), result(1.01, 9.0)])
    assert (found.groups, found.pairs) == (1, 5)  # 1.0 and 1.01 are too close to count
    assert found.right == pytest.approx(2 / 5)
    assert found.regret == pytest.approx(0.2)


def test_the_stored_constants_predict_dense_training() -> None:
    constants = fitted_constants()
    results, _ = predict_all(training_cases(), constants)
    dense = [one for one in results if one.case.kind == "dense" and not one.case.for_fitting]
    errors = errors_of([one.error for one in dense])
    assert errors.mdape < 0.11
    assert errors.within > 0.72
    assert errors_of(calibrated(dense, constants)).mdape < 0.09
    assert errors_of(constant_utilisation(results)).mdape > 1.8 * errors.mdape


def test_rows_that_ran_out_of_memory_are_found() -> None:
    constants = fitted_constants()
    results, skips = predict_all(memory_cases(), constants)
    kinds = Counter(one.case.kind for one in results)
    assert kinds["oom"] >= 18
    assert kinds["memory"] > 250
    assert all(skip.reason for skip in skips)
    fits = [one for one in results if one.case.kind == "memory"]
    found = out_of_memory([one for one in results if one.case.kind == "oom"], fits, constants)
    assert found["found"] >= 0.85 * found["rows"]
    assert found["false_alarm_share"] < 0.04
