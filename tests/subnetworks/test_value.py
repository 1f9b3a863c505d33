from dataclasses import FrozenInstanceError, replace

import pytest

from raptr.subnetworks import Shape, Subnetwork


def test_what_runs() -> None:
    part = Subnetwork((1.0, 0.0, 2.0, 0.0))
    assert (part.layers, part.kept, part.size) == (4, (0, 2), 2)
    assert Subnetwork.full(3).kept == (0, 1, 2)
    assert Subnetwork((0.0, 0.0)).kept == ()
    assert Subnetwork((0.0, 0.5), heads=((), (1, 2))).counts == {"size": 1, "heads": 2}
    assert Subnetwork((0.0, 0.0), heads=((), ())).counts == {"size": 0}
    assert Shape(3) == Shape(3, heads=1, parts=1)


def test_digest_tells_every_field_apart() -> None:
    base = Subnetwork((1.0, 0.5), heads=((0, 1), (2,)), parts=((0,), (1,)))
    variants = [
        base,
        replace(base, scales=(1.0, 0.25)),
        replace(base, scaled="branches"),
        replace(base, heads=((0, 1), (1,))),
        replace(base, heads=None),
        replace(base, parts=((0,), (0,))),
        replace(base, head_scale=2.0),
        replace(base, part_scale=2.0),
        replace(base, heads=None, head_gates=(1.0, 0.5)),
        replace(base, heads=None, head_gates=(1.0, 0.0)),
        replace(base, heads=None, parts=None, part_gates=(1.0, 0.5)),
    ]
    assert len({variant.digest for variant in variants}) == len(variants)
    assert replace(base).digest == base.digest
    assert Subnetwork.full(12).digest == "9a38f13ed030f38b"


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Subnetwork.full(2).scales = (0.0,)  # type: ignore[misc]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale is nan.* 0 "):
        Subnetwork((1.0, float("nan")))
    with pytest.raises(ValueError, match=r"scale is -1\.0"):
        Subnetwork((-1.0,))
    with pytest.raises(ValueError, match=r"scale is -0\.5"):
        Subnetwork((1.0,), head_gates=(1.0, -0.5))
    with pytest.raises(ValueError, match=r"scale is inf"):
        Subnetwork((1.0,), part_gates=(float("inf"),))
    for axis, gates in (("heads", "head_gates"), ("parts", "part_gates")):
        with pytest.raises(ValueError, match=rf"{axis} .*chosen.*gates"):
            Subnetwork((1.0,), **{axis: ((0,),), gates: (1.0, 0.5)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"heads has 1 .*2 layers"):
        Subnetwork((1.0, 1.0), heads=((0,),))
    with pytest.raises(ValueError, match=r"parts of layer 1 is \(\)"):
        Subnetwork((1.0, 1.0), parts=((0,), ()))
    with pytest.raises(ValueError, match=r"heads of layer 0 is \(1, 0\)"):
        Subnetwork((1.0,), heads=((1, 0),))
    for wrong in (0, 2.0, True):
        with pytest.raises(ValueError, match=rf"layers is {wrong}.* 1 "):
            Shape(wrong)  # type: ignore[arg-type]
