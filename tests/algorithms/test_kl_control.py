import pytest

from rlsys.algorithms.kl_control import adaptive_kl, fixed_kl
from tests.errors import invalid


def test_the_coefficient_follows_the_divergence_a_little() -> None:
    control = adaptive_kl(0.2, target=6.0)
    assert control.next(0.2, 6.0) == 0.2
    assert control.next(0.2, 6.6) == pytest.approx(0.2 * 1.01)
    assert control.next(0.2, 600.0) == pytest.approx(0.2 * 1.02)  # an error counts as 20 % at most
    assert control.next(0.2, 0.0) == pytest.approx(0.2 * 0.98)
    assert fixed_kl(0.1).next(0.1, 600.0) == 0.1


def test_impossible_controllers_are_refused() -> None:
    with invalid("fixed_kl: initial", -0.1):
        fixed_kl(-0.1)
    with invalid("adaptive_kl: target", 0):
        adaptive_kl(0.1, target=0)
