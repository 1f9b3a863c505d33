"""The value that says who a process is: one process alone, and what needs no second one to be tested."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.run import parse_args
from typer.main import get_command

from raptr.cli import app
from raptr.data import TokenStore
from raptr.distributed.processes import ALONE, Processes, joined
from raptr.models.init import normal
from raptr.train.config import Config, differences
from raptr.train.loop import Trainer, pretrain
from raptr.train.run import RunFolder
from tests.distributed.cases import config
from tests.train.legs import QUIET

CPU = torch.device("cpu")


def test_one_process_answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with joined() as processes:
        assert processes is ALONE
    asked = False
    agreement = processes.agree(lambda: pytest.fail("nothing to compare"), lambda: asked)
    asked = True  # the flag is read when the step is over
    assert agreement.settle()
    assert processes.gather("mine") == ["mine"]
    assert processes.from_first(lambda: "made") == "made"
    assert not processes.any(False)
    tensor = torch.ones(2)
    assert processes.mean(tensor) is tensor
    with pytest.raises(KeyError), processes.together():
        raise KeyError


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", range(8))
def test_items_are_shared_and_everybody_gets_as_many(size: int, count: int) -> None:
    shares = [list(Processes(rank, size).share(range(count))) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(item for share in shares for item, counts in share if counts) == list(range(count))


def test_numbers_of_a_shard_are_those_of_the_whole() -> None:
    whole = normal(3, "tokens.weight", 101)
    for first in (0, 1, 7, 50, 100):
        for count in (0, 1, 2, 33):
            part = normal(3, "tokens.weight", count, first)
            assert part[: 101 - first].tolist() == whole[first : first + count].tolist()


@pytest.mark.parametrize(
    ("train", "size", "match"),
    [
        ({"batch": 8}, 3, r"train\.batch is 8.*3 processes.*train\.accumulate 1.*multiple of 3"),
        ({"batch": 8, "accumulate": 4}, 4, r"train\.batch is 8.*4 processes.*train\.accumulate 4.*multiple of 16"),
    ],
)
def test_a_batch_that_cannot_be_shared_is_refused(
    train: dict[str, int], size: int, match: str, stores: dict[str, TokenStore], tmp_path: Path
) -> None:
    (tmp_path / "bert").symlink_to(stores["bert"].path, target_is_directory=True)
    chosen = config("bert, raptr", tmp_path, None, **train)
    with pytest.raises(ValueError, match=match):
        Trainer(chosen, RunFolder(tmp_path / "run"), stores["bert"], CPU, Processes(0, size))


def test_engines_need_torchrun(stores: dict[str, TokenStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "bert").symlink_to(stores["bert"].path, target_is_directory=True)
    with pytest.raises(ValueError, match=r"train\.parallel is fsdp.*torchrun"):
        pretrain(config("bert, raptr", tmp_path, "fsdp"), tmp_path / "run", console=QUIET)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"shards": 2}, r"train\.shards is 2.*hsdp"),
        ({"shards": 2, "parallel": "fsdp"}, r"train\.shards is 2.*hsdp"),
        ({"shards": 0, "parallel": "hsdp"}, r"train\.shards is 0"),
        ({"parallel": "zero"}, r"train\.parallel is 'zero'.*ddp.*fsdp.*hsdp"),
        ({"timeout": 0.0}, r"train\.timeout is 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Config.read({"train": {"steps": 10, **settings}})


def test_processes_and_micro_batches_may_change_unless_something_is_dropped(
    stores: dict[str, TokenStore], tmp_path: Path
) -> None:
    (tmp_path / "bert").symlink_to(stores["bert"].path, target_is_directory=True)
    one, four = (config("bert, raptr", tmp_path, accumulate=count) for count in (1, 4))
    assert differences(one.mapping(), four.mapping()) == {}
    dropping = {"dropout": 0.1, **one.model.given}
    one, four = (replace(chosen, model=replace(chosen.model, given=dropping)) for chosen in (one, four))
    assert differences(one.mapping(), four.mapping()) == {"train.accumulate": "was 1, now 4"}
    pretrain(one, tmp_path / "run", until=1, console=QUIET)
    start = {"step": 1, "data": stores["bert"].fingerprint, "processes": 2}
    with pytest.raises(ValueError, match=r"1 processes.* 2;.*model\.dropout"):
        RunFolder(tmp_path / "run").begin(one, stores["bert"].path / "tokenizer.json", start)


def test_torchrun_understands_the_lines_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [
        line.strip().removeprefix("srun ") for line in page.splitlines() if "torchrun --" in line and "-m raptr" in line
    ]
    assert len(lines) == 3
    for line in lines:
        given = parse_args(shlex.split(line)[1:])  # type: ignore[no-untyped-call]
        assert (given.training_script, given.module) == ("raptr", True)
        name, *options = [word for word in given.training_script_args if word != "--"]  # Pythons differ in keeping it
        assert name == "pretrain"
        command = get_command(app).commands["pretrain"]  # type: ignore[attr-defined]
        context = command.make_context(name, options)
        assert context.params["run"] is not None
        assert context.params["parallel"] in ("ddp", "hsdp")
