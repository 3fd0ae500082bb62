"""Curves of reward over compute: fitted with their uncertainty, and drawn on into the future.

    metrics of a run ─► series.py ─► Series ─► fit.py, with a law of laws.py ─► Fit
    Series ─► prediction.py ─► Prediction, to print and to draw (picture.py);  Fits ─► sizes.py

scripts/fit.py is the command.
"""

from rlsys.scaling.fit import Fit, Interval, fit
from rlsys.scaling.laws import LAWS, POWER_LAW, SIGMOID, Law
from rlsys.scaling.series import Series, read_series
from rlsys.scaling.sizes import SizeLaw, fit_sizes

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
