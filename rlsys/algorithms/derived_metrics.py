"""Metrics of a step that are computed from means over its tokens.

In: means over the global batch of the metrics that losses report per token. Out: further metrics.
The trainer calls `derived_metrics` once for each step, after the reduction, so the results do not
depend on micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlsys.metrics import EFFECTIVE_SAMPLE_FRAC, EXPLAINED_VARIANCE

OF_VALUES = {"value/return", "value/return_squared", "value/error", "value/error_squared"}
OF_WEIGHTS = {"offpolicy/weight", "offpolicy/weight_squared"}


def derived_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics whose parts are in `means`.

    value/explained_variance = 1 − Var(R − V)/Var(R), from `value_metrics` (values.py): 1 is
    perfect, 0 is as good as a constant. It is left out if all returns are equal.

    offpolicy/effective_sample_frac = mean(w)²/mean(w²), from `observed` (composed.py): the fraction
    of the tokens that count under the importance weights w, 1 on-policy.
    """
    found = {}
    if means.keys() >= OF_VALUES:
        spread = means["value/return_squared"] - means["value/return"] ** 2
        error = means["value/error_squared"] - means["value/error"] ** 2
        # The rounding of float32 sums leaves about 1e-7 of the square.
        if spread > 1e-6 * means["value/return_squared"]:
            found[EXPLAINED_VARIANCE] = 1 - error / spread
    if means.keys() >= OF_WEIGHTS and means["offpolicy/weight_squared"] > 0:
        found[EFFECTIVE_SAMPLE_FRAC] = (
            means["offpolicy/weight"] ** 2 / means["offpolicy/weight_squared"]
        )
    return found
