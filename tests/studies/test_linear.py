"""Linear networks: Ψ against brute force, exponents against known power laws, and the lemmas' simple cases."""

import json
import math
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from raptr.studies import linear
from raptr.studies.contract import conduct
from raptr.studies.linear import ARCHITECTURES, LINEAR, Setting

QUIET = Console(quiet=True)
TINY = Setting(depth=16, widths=(12,), inputs=(3,), alignment_depth=16)


def network(x: Tensor, layers: list[Tensor], name: str, dropped: int | None = None) -> Tensor:
    """The network written out, one input and one layer at a time."""
    rows = []
    for row in x:
        y = row
        for place, weight in enumerate(layers):
            if place == dropped:
                continue
            z = weight @ (y / math.sqrt(sum(value**2 for value in y.tolist())) if "norm" in name else y)
            y = y + z if "residual" in name else z
        rows.append(y)
    return torch.stack(rows)


def pieces(
    tau: float, width: int = 12, depth: int = 6, kind: str = "spread", inputs: int = 3
) -> tuple[list[Tensor], Tensor]:
    shared = linear.shared_matrix(kind, 3, width, 0.1, "cpu")
    layers = list(linear.mixed(tau, shared, linear.gaussians(3, width, depth, "cpu")))
    return layers, linear.unit_inputs(3, width, inputs, "cpu")


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("tau", [0.0, 0.3])
def test_every_depth_and_every_dropped_layer_equal_brute_force(name: str, tau: float) -> None:
    layers, x = pieces(tau)
    found = linear.profile(iter(layers), x, ARCHITECTURES[name])
    for depth in range(1, len(layers) + 1):
        whole = network(x, layers[:depth], name)
        psi = [(network(x, layers[:depth], name, dropped) - whole).norm(dim=1) for dropped in range(depth)]
        assert found.norms_L[depth - 1] == pytest.approx(whole.norm(dim=1).mean().item(), rel=1e-12)
        assert found.psi_LL[depth - 1] == pytest.approx([one.mean().item() for one in psi], rel=1e-12)
        ratios = torch.stack([one / whole.norm(dim=1) for one in psi])
        assert found.gap_L[depth - 1] == pytest.approx(ratios.mean().item(), rel=1e-12)


@pytest.mark.parametrize("kind", Setting().shared)
def test_shared_matrices_have_norm_one_and_the_gap(kind: str) -> None:
    shared = linear.shared_matrix(kind, 5, 20, 0.1, "cpu")
    assert torch.linalg.matrix_norm(shared, 2).item() == pytest.approx(1, rel=1e-12)
    if kind != "gaussian":
        values = torch.linalg.eigvalsh(shared).flip(0)
        assert values[0].item() == pytest.approx(1)
        assert values[1].item() == pytest.approx(0.9 if kind == "spread" else 0, abs=1e-12)


def test_random_layers_have_entries_of_variance_one_over_d_and_mix_in_squares() -> None:
    drawn = linear.gaussians(0, 200, 3, "cpu")
    assert drawn.var().item() * 200 == pytest.approx(1, abs=0.02)
    assert abs((drawn[0] * drawn[1]).mean().item()) * 200 < 0.02
    shared = torch.ones(200, 200, dtype=torch.float64)
    mixed = list(linear.mixed(0.36, shared, drawn))
    torch.testing.assert_close(mixed[2], 0.6 * shared + 0.8 * drawn[2])


def test_exponents_of_power_laws_are_recovered() -> None:
    depths = Setting().depths
    assert depths == [4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128]
    assert linear.exponent(depths, [3.7 * depth**-0.4 for depth in depths]) == pytest.approx(-0.4, abs=1e-12)
    assert linear.slope([1, 2, 5], [3.0, 5.0, 11.0]) == pytest.approx(2)
    # the end of a law that bends is fitted alone
    bent = [depth**-0.1 if depth < 32 else depth**-1.0 for depth in depths]
    assert linear.exponent(*linear._late(depths, bent)) == pytest.approx(-1)


def test_intervals_are_students() -> None:
    found = linear.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found["mean"] == 3
    assert found["high"] == pytest.approx(3 + 2.776 * math.sqrt(2.5 / 5))
    assert found["low"] == pytest.approx(3 - 2.776 * math.sqrt(2.5 / 5))
    assert linear.interval([2.0]) == {"mean": 2.0, "low": None, "high": None}


def test_random_residual_normed_networks_follow_their_wide_limit() -> None:
    layers, x = pieces(0, width=300, depth=24, inputs=30)
    found = linear.profile(iter(layers), x, ARCHITECTURES["residual + norm"])
    assert found.norms_L == pytest.approx([math.sqrt(place + 1) for place in range(1, 25)], rel=0.05)
    assert found.psi_LL[-1] == pytest.approx(linear.wide_psi(24), rel=0.08)
    assert found.gap_L == pytest.approx([linear.wide_gap(depth) for depth in range(1, 25)], rel=0.06)
    # the lemma's square root is reached from above, far beyond the depths of any model
    assert math.log2(linear.wide_gap(32) / linear.wide_gap(16)) > -0.45
    assert math.log2(linear.wide_gap(16384) / linear.wide_gap(8192)) == pytest.approx(-0.5, abs=0.01)


def test_without_norm_or_residual_the_gap_stays() -> None:
    layers, x = pieces(0, width=300, depth=16, inputs=30)
    residual = linear.profile(iter(layers), x, ARCHITECTURES["residual"])
    assert residual.norms_L == pytest.approx([2 ** (place / 2) for place in range(1, 17)], rel=0.1)
    assert residual.psi_LL[-1] == pytest.approx([2**7.5] * 16, rel=0.15)  # 2^((L-1)/2) for every layer
    assert residual.gap_L == pytest.approx([0.5**0.5] * 16, rel=0.06)
    assert linear.profile(iter(layers), x, ARCHITECTURES["norm"]).gap_L == pytest.approx([2**0.5] * 16, rel=0.06)


@pytest.mark.parametrize("name", ["residual + norm", "norm"])
def test_of_equal_layers_it_does_not_matter_which_is_dropped(name: str) -> None:
    layers, x = pieces(1)
    psi = linear.profile(iter(layers), x, ARCHITECTURES[name]).psi_LL[-1]
    assert psi == pytest.approx([psi[0]] * len(layers), rel=1e-9)
    layers, x = pieces(0.5)
    psi = linear.profile(iter(layers), x, ARCHITECTURES[name]).psi_LL[-1]
    assert max(psi) / min(psi) > 1.05


def test_equal_layers_align_as_a_power_of_depth() -> None:
    found = linear.alignment(Setting(widths=(40,), inputs=(20,), alignment_depth=512), 1.0, 0, "cpu")
    assert found["tangent_exponent"] == pytest.approx(-1, abs=0.05)
    assert found["norm_exponent"] == pytest.approx(1, abs=0.05)


def test_a_study_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "Setting", lambda **_: TINY)
    folder = conduct(LINEAR, tmp_path, seeds=2, small=True, device="cpu", console=QUIET)
    whole = json.loads((folder / "result.json").read_text())
    assert (folder / "linear.png").stat().st_size > 10_000
    kept = (folder / "job-12-0.json").stat().st_mtime_ns
    (folder / "job-12-1.json").unlink()
    drawn: list[int] = []
    original = linear.gaussians

    def counted(seed: int, width: int, count: int, device: str) -> Tensor:
        drawn.append(seed)
        return original(seed, width, count, device)

    monkeypatch.setattr(linear, "gaussians", counted)
    conduct(LINEAR, tmp_path, seeds=2, small=True, device="cpu", console=QUIET)
    assert drawn == [1]
    assert (folder / "job-12-0.json").stat().st_mtime_ns == kept
    assert json.loads((folder / "result.json").read_text()) == whole
    # another setting leaves these parts alone
    monkeypatch.setattr(linear, "Setting", lambda **_: Setting(depth=16, widths=(12,), inputs=(4,), alignment_depth=16))
    with pytest.raises(ValueError, match=r"linear-small has jobs with other settings \(.*was .*, now .*--out"):
        conduct(LINEAR, tmp_path, seeds=1, small=True, device="cpu", console=QUIET)
    assert drawn == [1]
    assert json.loads((folder / "result.json").read_text()) == whole


def test_result_has_every_case_with_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "Setting", lambda **_: TINY)
    result = linear.run(tmp_path, seeds=3, small=True, device="cpu", console=QUIET)
    assert len(result["cases"]) == 5 + 3 * 2 + 2 * 4
    for case in result["cases"]:
        fit = case["gap_exponent"]
        assert fit["low"] < fit["mean"] < fit["high"]
        assert case["growth"] == ("exponent" if ARCHITECTURES[case["architecture"]].norm else "doublings a layer")
    figure = linear.plot(result)
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    gap, gaps = figure.axes[2], figure.axes[4]
    labels = [label.get_text() for label in gap.get_yticklabels(which="both") if label.get_text()]
    assert labels == [f"{float(label):g}" for label in labels]  # plain numbers, none as a product with a power of ten
    assert gaps.get_ylim()[0] == pytest.approx(max(1e-3, gaps.dataLim.y0 / 8))
