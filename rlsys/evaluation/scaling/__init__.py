"""Curves of reward over compute: fits with uncertainty, and predictions for more compute.

    metrics of a run ─► series.py ─► Series ─► scaling_fit.py, with a law (laws.py) ─► Fit
    Series ─► prediction.py ─► Prediction, which is printed and drawn (scaling_picture.py)
    Fits ─► model_sizes.py

The command is `rlsys fit`.
"""

from rlsys.evaluation.scaling.laws import LAWS, POWER_LAW, SIGMOID, Law
from rlsys.evaluation.scaling.model_sizes import SizeLaw, fit_sizes
from rlsys.evaluation.scaling.scaling_fit import Fit, Interval, fit
from rlsys.evaluation.scaling.series import Series, read_series

__all__ = [
    "LAWS",
    "POWER_LAW",
    "SIGMOID",
    "Fit",
    "Interval",
    "Law",
    "Series",
    "SizeLaw",
    "fit",
    "fit_sizes",
    "read_series",
]
