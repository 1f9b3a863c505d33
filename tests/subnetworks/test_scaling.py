import pytest
from hypothesis import given
from hypothesis import strategies as st

from raptr.subnetworks.scaling import scales, square_root


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_squared_scales_add_up_as_in_the_full_model(kept: list[bool]) -> None:
    """For each kept j, and for L + 1: the squares below j sum to j - j₁, j₁ the first kept layer."""
    result = square_root(kept)
    assert [scale == 0 for scale in result] == [not runs for runs in kept]
    first = next((layer for layer, runs in enumerate(kept) if runs), len(kept))
    for j in [*(layer for layer, runs in enumerate(kept) if runs), len(kept)]:
        assert sum(scale**2 for scale in result[:j]) == pytest.approx(j - first)


def test_literal_scales() -> None:
    kept = (True, False, False, True, True, False)
    assert square_root(kept) == (3**0.5, 0, 0, 1, 2**0.5, 0)
    assert scales("sqrt", kept, (1.0,) * 6) == square_root(kept)
    assert scales("linear", kept, (1.0, 0.5, 0.5, 0.5, 0.25, 0.5)) == (1, 0, 0, 2, 4, 0)
    assert scales("none", kept, (0.5,) * 6) == (1, 0, 0, 1, 1, 0)
    # training never runs the fourth layer, so there is no scale of training to take
    assert scales("linear", kept, (1.0, 0.5, 0.5, 0.0, 0.25, 0.0)) == (1, 0, 0, 1, 4, 0)


@pytest.mark.parametrize("scaling", ["sqrt", "linear", "none"])
def test_everything_kept_is_unscaled(scaling: str) -> None:
    assert scales(scaling, (True,) * 5, (1.0,) * 5) == (1.0,) * 5  # type: ignore[arg-type]
