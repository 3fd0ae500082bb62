"""Numbers of a step that are no mean over its tokens, from numbers that are.

In: the means over the global batch of what losses report per token. Out: further metrics. Whoever
reduces a step calls `derived_metrics` once, afterwards, so that they do not depend on micro-batches
or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlsys.metrics import EFFECTIVE_SAMPLE_FRAC, EXPLAINED_VARIANCE

OF_VALUES = {"value/return", "value/return_squared", "value/error", "value/error_squared"}
OF_WEIGHTS = {"offpolicy/weight", "offpolicy/weight_squared"}


def derived_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Those whose parts are there:

    value/explained_variance = 1 − Var(R − V)/Var(R), of `value_metrics` (values.py); 1 is perfect,
    0 as good as a constant. Left out where all returns are equal.

    offpolicy/effective_sample_frac = mean(w)²/mean(w²), of `observed` (composed.py): which part of
    the tokens counts under the importance weights w; 1 on-policy.
    """
    found = {}
    if means.keys() >= OF_VALUES:
        spread = means["value/return_squared"] - means["value/return"] ** 2
        error = means["value/error_squared"] - means["value/error"] ** 2
        # Rounding alone, of float32 sums, leaves about 1e-7 of the square.
        if spread > 1e-6 * means["value/return_squared"]:
            found[EXPLAINED_VARIANCE] = 1 - error / spread
    if means.keys() >= OF_WEIGHTS and means["offpolicy/weight_squared"] > 0:
        found[EFFECTIVE_SAMPLE_FRAC] = (
            means["offpolicy/weight"] ** 2 / means["offpolicy/weight_squared"]
        )
    return found
