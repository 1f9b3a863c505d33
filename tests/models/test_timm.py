"""Vision models of `timm`, where it is installed."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import families as sweep
from raptr.models.attach import attach, running
from raptr.subnetworks import Subnetwork


@pytest.fixture(scope="module")
def timm() -> Any:
    torchvision = importlib.util.find_spec("torchvision")
    if torchvision is None or importlib.util.find_spec("timm") is None:
        pytest.skip("timm and torchvision are not installed")
    assert torchvision.origin is not None
    operators: Any = torch.ops
    try:
        for compiled in Path(torchvision.origin).parent.glob("_C*.so"):
            operators.load_library(compiled)
    except OSError:
        # Built for CUDA, beside a torch for the CPU. Its Python loads all the same, once its operators have names;
        # they are for detection, and no model here calls them.
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    return importlib.import_module("timm")


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "deit3_small_patch16_224", "eva02_tiny_patch14_224", "beit_base_patch16_224"]
)
def test_a_part_of_the_blocks_is_the_smaller_model(timm: Any, name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=4)
    line = sweep.check(model, {"x": torch.randn(2, 3, 32, 32)})
    assert line == {"named": False, "blocks": ["blocks"], "scales": True, "result": "any", "axes": False, "grows": True}


def test_stages_of_other_widths_are_refused(timm: Any) -> None:
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, embed_dim=12, num_heads=(1, 2, 3, 4))
    part = Subnetwork((1.0, 1.0, 1.0, 0.0))
    with pytest.raises(ValueError, match=r"\(2, .*\) of \(2, "), running(attach(model), part):
        model(torch.randn(2, 3, 56, 56))
