"""Curves of reward over compute: fits with uncertainty, and predictions for more compute.

    metrics of a run ─► series.py ─► Series ─► scaling_fit.py, with a law (laws.py) ─► Fit
    Series ─► prediction.py ─► Prediction, printed, drawn (picture.py);  Fits ─► model_sizes.py

The command is scripts/fit.py.
"""

from scripts.scaling.laws import LAWS, POWER_LAW, SIGMOID, Law
from scripts.scaling.model_sizes import SizeLaw, fit_sizes
from scripts.scaling.scaling_fit import Fit, Interval, fit
from scripts.scaling.series import Series, read_series

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
