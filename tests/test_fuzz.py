"""Whatever is in a configuration or happened to a file: a sentence or the right answer, never another exception."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raptr.data import TokenStore, open_store
from raptr.data.prepare import Document, prepare
from raptr.recipes import RECIPES
from raptr.report.runs import read_run
from raptr.train import checkpoint
from raptr.train.config import Config

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**9),
    st.sampled_from([2**31, 2**63, 10**30, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["6-8-10-12", "3-6", "raptr", "pld", "zero", "tiny", "1-2-4", "equal", "cuda", "linear"]),
    st.sampled_from(["stacking", "lemon", "msg", "3-12", "6-12-24", "copy", "reset"]),
    st.lists(st.one_of(st.integers(-9, 9), st.none(), st.lists(st.integers(-9, 9), max_size=3)), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)
KEYS = sorted(
    {
        f"{section}.{key}"
        for recipe in RECIPES.values()
        for section, values in Config.read(recipe()).mapping().items()
        for key in values
    }
    | {
        "method.moments",
        "method.mask_steps",
        "method.init",
        "method.theta",
        "method.keep",
        "method.drop",
        "method.gamma",
        "method.profile",
        "method.recovery",
        "x.y",
        "train.x",
    }
)


@given(st.sampled_from(sorted(RECIPES)), st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=4))
@settings(max_examples=400, deadline=None)
def test_any_configuration_is_read_or_refused_in_a_sentence(recipe: str, changes: list[tuple[str, Any]]) -> None:
    given_settings: dict[str, Any] = copy.deepcopy(RECIPES[recipe]())
    for name, value in changes:
        section, key = name.split(".")
        given_settings.setdefault(section, {})[key] = value
    try:
        config = Config.read(given_settings)
    except ValueError:
        return
    saved = yaml.safe_load(yaml.safe_dump(config.mapping()))
    assert Config.read(saved).mapping() == config.mapping()


WORDS = st.sampled_from(["train", "method", "model", "data", "optimizer", "steps", "name", "size", "a"])
STEPS = st.just({"steps": 8})


@given(
    st.dictionaries(WORDS, st.recursive(VALUES, lambda inner: st.dictionaries(WORDS, inner, max_size=3)), max_size=5),
    st.one_of(st.none(), STEPS),
)
@settings(max_examples=300, deadline=None)
def test_any_mapping_is_read_or_refused_in_a_sentence(value: dict[str, Any], train: dict[str, Any] | None) -> None:
    """With a good section `train` among others, so that some are read."""
    given_settings = value if train is None else {**value, "train": train}
    try:
        config = Config.read(given_settings)
    except ValueError:
        return
    assert set(given_settings) <= set(config.mapping())
    assert Config.read(config.mapping()).mapping() == config.mapping()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    documents = [Document(f"{i}.txt", f"to be or not {i} to be, that is number {i * i}. " * 5) for i in range(40)]
    return prepare(tmp_path_factory.mktemp("corpus") / "store", lambda: documents, 300)


DAMAGE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def damage(folder: Path, data: st.DataObject) -> Path:
    """Change, cut or remove one file; returns it."""
    file = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
    content = bytearray(file.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "remove", "empty"]))
    if kind == "remove":
        file.unlink()
    elif kind == "flip" and content:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content)
    else:
        file.write_bytes({"cut": bytes(content[: len(content) // 2]), "grow": bytes(content) + b"\0"}.get(kind, b""))
    return file


@given(st.data())
@DAMAGE
def test_a_damaged_token_folder_is_noticed(store: TokenStore, tmp_path: Path, data: st.DataObject) -> None:
    copied = tmp_path / "copy"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(store.path, copied)
    before = {path.name: path.read_bytes() for path in copied.iterdir()}
    damage(copied, data)
    same = before == {path.name: path.read_bytes() for path in copied.iterdir()}
    try:
        found = open_store(copied)
        found.verify()
    except ValueError:
        assert not same
        return
    # what passes is what was written: only a manifest's free text may have changed unnoticed
    assert same or found.fingerprint == store.fingerprint


@given(st.data())
@DAMAGE
def test_a_damaged_checkpoint_is_never_loaded(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    for step in (5, 10):
        checkpoint.save(folder, step, {"w": torch.full((4,), float(step))}, {"step": step}, keep=2)
    before = {path: path.read_bytes() for path in (folder / "step-10").iterdir()}
    damage(folder / "step-10", data)
    same = before == {path: path.read_bytes() for path in (folder / "step-10").iterdir()}
    if same:
        return
    with pytest.warns(UserWarning, match=r"step-10 .*damaged.*step-5"):
        found = checkpoint.load_latest(folder)
    assert found is not None
    into = {"w": torch.zeros(4)}
    found.read(into)
    assert into["w"].tolist() == [5.0] * 4


@given(st.binary(max_size=400), st.binary(max_size=200))
@DAMAGE
def test_any_metrics_are_read_or_refused_in_a_sentence(tmp_path: Path, metrics: bytes, config: bytes) -> None:
    good = b'{"kind": "eval", "step": 0, "loss": 1.5, "tokens": 0, "flops": 0, "flops_layers": 0, "seconds": 0}\n'
    (tmp_path / "config.yaml").write_text("method: {name: raptr}\ntrain: {steps: 1, seed: 0, batch: 1}\n")
    (tmp_path / "environment.json").write_text("[{}]")
    (tmp_path / "metrics.jsonl").write_bytes(metrics + b"\n" + good)
    assert read_run(tmp_path).evals[-1].loss == 1.5
    (tmp_path / "config.yaml").write_bytes(config)
    try:
        read_run(tmp_path)
    except ValueError:
        return
