"""A tiny task is learnt and noise is not; a killed command goes on; every refusal."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from raptr import files
from raptr.data import TokenStore
from raptr.evaluation import finetuning
from raptr.evaluation.encoder import Encoder, load_encoder, tokenize
from raptr.evaluation.finetuning import Finetuning, Key, Request
from raptr.evaluation.grid import MOST
from raptr.evaluation.jobs import Judged
from raptr.evaluation.run import finetune_all
from raptr.evaluation.stepping import Steps
from raptr.evaluation.tuning import Recipe, Tuning
from raptr.models.export import save
from raptr.report.runs import read_scores
from raptr.train.config import Config
from raptr.train.loop import pretrain
from tests.commands import call
from tests.evaluation.tiny import make_bert, make_task, opinions, shuffled, stock_tokenizer, write_jsonl

QUIET = Console(quiet=True)
SHORT = Recipe(batch=16)
RATE = 1e-3
WORDS = "bert.embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"), opinions(400, 0), opinions(200, 1))


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("little"), opinions(64, 0), opinions(40, 1))


def finetune(
    model: Path, task: str, data: Path, out: Path | None = None, *, device: str = "cpu", jobs: int = 1, **wanted: Any
) -> Judged:
    request = Request(model, task, data, out, **wanted)
    return finetune_all([request], device=device, jobs=jobs, console=QUIET)[0]


def tuned(model: Path, data: Path, out: Path, **settings: Any) -> dict[str, Any]:
    done = finetune(model, settings.pop("name", "sst2"), data, out, **{"recipe": SHORT, **settings})
    assert done.record is not None
    return done.record


def best(record: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in record["rows"] if row["best"])


def test_a_task_is_learnt(bert: Path, task: Path, tmp_path: Path) -> None:
    record = tuned(bert, task, tmp_path, rates=[1e-7, RATE], seeds=2)
    assert best(record)["rate"] == RATE
    assert best(record)["means"]["accuracy"] > 0.95
    assert record["rows"][0]["means"]["accuracy"] < 0.7  # the rate matters
    assert record["baseline"]["accuracy"] == pytest.approx(0.5, abs=0.05)
    assert json.loads((tmp_path / "finetune.json").read_text()) == record
    assert (tmp_path / "finetune.png").read_bytes().startswith(b"\x89PNG")


def test_a_random_encoder_is_at_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether two words have the same tone is too much for a stock BERT with random weights and few examples."""
    praise = [(row["sentence"], row["label"]) for row in opinions(600, 0)]
    rows: list[dict[str, object]] = [
        {"sentence1": one, "sentence2": other, "label": int(first == second)}
        for (one, first), (other, second) in zip(praise[:300], praise[300:], strict=True)
    ]
    data = make_task(tmp_path / "task", rows[:100], rows[100:])
    model = make_bert(tmp_path / "random")
    monkeypatch.setenv("COLUMNS", "200")
    options = ["--rate", "5e-5", "--seeds", "2", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert call(monkeypatch, "finetune", str(model), "--task", "rte", "--data", str(data), *options) == 0
    assert "That is chance" in " ".join(capsys.readouterr().out.split())
    record = json.loads((tmp_path / "out" / "finetune.json").read_text())
    assert best(record)["means"]["accuracy"] == pytest.approx(0.5, abs=0.11)  # three standard errors


def test_shuffled_labels_are_at_chance(bert: Path, tmp_path: Path) -> None:
    data = make_task(tmp_path / "task", shuffled(opinions(400, 0), 2), shuffled(opinions(400, 1), 3))
    record = tuned(bert, data, tmp_path / "out", rates=[RATE], seeds=2)
    assert best(record)["means"]["accuracy"] == pytest.approx(0.5, abs=0.08)  # three standard errors


def test_pairs_and_regression(bert: Path, tmp_path: Path) -> None:
    rows = [
        {"sentence1": row["sentence"], "sentence2": "the film", "label": 5.0 * float(str(row["label"]))}
        for row in opinions(400, 0)
    ]
    data = make_task(tmp_path / "task", rows[:300], rows[300:])
    record = tuned(bert, data, tmp_path / "out", name="stsb", rates=[3e-3], seeds=1)
    means = best(record)["means"]
    assert means["pearson"] > 0.9
    assert means["pearson-spearman"] == pytest.approx((means["pearson"] + means["spearman"]) / 2)
    assert record["baseline"] == {"pearson-spearman": 0, "pearson": 0, "spearman": 0}


def test_the_recipe_is_the_papers(bert: Path) -> None:
    recipe = Recipe()
    assert (recipe.epochs, recipe.batch, recipe.length, recipe.dropout) == (3, 32, 128, 0.1)
    assert [recipe.rate(step, 100) for step in (0, 2, 5, 6, 99)] == pytest.approx([1 / 6, 1 / 2, 1, 1, 1])
    model = load_encoder(bert).classifier(3, 0.25)
    dropouts = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert dropouts
    assert set(dropouts) == {0.25}
    assert model.config.attention_probs_dropout_prob == 0.25
    assert model.dtype == torch.float32


def test_the_encoders_weights_are_used_and_the_head_follows_the_seed(bert: Path) -> None:
    encoder = load_encoder(bert)
    heads = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model = encoder.classifier(2, 0.1)
        assert torch.equal(model.state_dict()[WORDS], BertForMaskedLM.from_pretrained(bert).state_dict()[WORDS])
        heads.append(model.state_dict()["classifier.weight"])
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_the_longer_text_is_cut(bert: Path) -> None:
    encoder = load_encoder(bert)
    ((coded,), cut) = tokenize(encoder, [("film " * 30, "fine story")], 12, leading_space=False)
    assert cut == 1
    words = encoder.folder.tokenizer.convert_ids_to_tokens(coded["input_ids"])
    assert words == ["[CLS]", *["film"] * 7, "[SEP]", "fine", "story", "[SEP]"]
    assert coded["token_type_ids"] == [0] * 9 + [1] * 3
    ((coded,), cut) = tokenize(encoder, [("film " * 99,)], 128, leading_space=False)
    assert cut == 1
    assert len(coded["input_ids"]) == 24  # the model's own limit


@pytest.mark.parametrize(
    ("length", "limit", "cut"),
    [(128, "24 tokens, the most that the model reads", 8), (12, "--length 12", 16)],  # the model has 24 positions
)
def test_texts_that_are_cut_are_counted(
    length: int, limit: str, cut: int, bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    for name in ("train", "dev"):
        rows = [{"sentence": "film " * count, "label": count % 2} for count in (3, 15, 16, 30, 41) * 4]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe(epochs=1, length=length)
    request = Request(bert, "sst2", folder, tmp_path / "out", rates=[RATE], seeds=1, recipe=recipe)
    (done,) = finetune_all([request], device="cpu", console=Console(width=200))
    assert f"{2 * cut} of 40 examples are longer than {limit}, and are cut" in capsys.readouterr().out
    assert done.record is not None
    assert [(job["length"], job["cut"]) for job in done.record["jobs"]] == [(min(length, 24), 2 * cut)]


@pytest.mark.parametrize(("width", "highest"), [(32, 3e-4), (520, 5e-5)])
def test_narrow_models_get_higher_rates(width: int, highest: float, tmp_path: Path) -> None:
    model = make_bert(tmp_path / "model", width=width, num_hidden_layers=1)
    assert max(load_encoder(model).rates) == highest


def test_examples_takes_a_part_of_the_training_file(bert: Path, task: Path, tmp_path: Path) -> None:
    record = tuned(bert, task, tmp_path, rates=[RATE], seeds=1, recipe=Recipe(batch=16, examples=32, epochs=1))
    assert record["recipe"]["examples"] == 32
    assert record["data"]["train"]["examples"] == 400
    assert record["data"]["dev"]["examples"] == 200


def test_a_job_that_diverges_is_recorded(little: Path, tmp_path: Path) -> None:
    model = make_bert(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["bert.embeddings.LayerNorm.bias"][3] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    record = tuned(model, little, tmp_path / "out", rates=[RATE], seeds=2)
    assert [(job["scores"], job["diverged"]) for job in record["jobs"]] == [(None, 0)] * 2
    assert [(row["diverged"], row["best"]) for row in record["rows"]] == [(2, False)]
    assert (tmp_path / "out" / "finetune.png").is_file()
    rows: list[dict[str, object]] = [
        {"sentence1": row["sentence"], "sentence2": "it is", "label": 0.1 * number}
        for number, row in enumerate(opinions(40, 0))
    ]
    similar = make_task(tmp_path / "similar", rows[:32], rows[32:])
    record = tuned(model, similar, tmp_path / "regression", name="stsb", rates=[RATE], seeds=2, jobs=2)
    assert [job["scores"] for job in record["jobs"]] == [None, None]


def results(folder: Path) -> dict[str, Any]:
    loaded = {path.name: json.loads(path.read_text()) for path in sorted((folder / "jobs").glob("*.json"))}
    return {name: {**job, "seconds": 0} for name, job in loaded.items()}


def test_a_stop_keeps_finished_jobs_and_the_same_command_goes_on(
    bert: Path, little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(bert, little, tmp_path / "whole", rates=[RATE], seeds=3)
    written = files.write_json

    def write_and_stop(place: Path, value: Any) -> None:
        written(place, value)
        if place.parent.name == "jobs":
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(finetuning, "write_json", write_and_stop)
        part = finetune(bert, "sst2", little, tmp_path / "part", recipe=SHORT, rates=[RATE])
    assert (part.finished, part.planned, part.stopped) == (1, 3, True)
    first = tmp_path / "part" / "jobs" / f"{RATE!r}-0.json"
    before = first.read_bytes()
    tuned(bert, little, tmp_path / "part", rates=[RATE], seeds=3)
    assert first.read_bytes() == before
    assert results(tmp_path / "part") == results(tmp_path / "whole")
    more = tuned(bert, little, tmp_path / "part", rates=[2e-3], seeds=1)  # another rate is added to what is there
    assert [row["rate"] for row in more["rows"]] == [RATE, 2e-3]


def test_a_killed_command_goes_on(bert: Path, little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    options = ["--rate", str(RATE), "--batch", "16", "--device", "cpu", "--out", str(out)]
    command = ["finetune", str(bert), "--task", "sst2", "--data", str(little), *options, "--seeds"]
    process = subprocess.Popen([sys.executable, "-m", "raptr", *command, "1000"], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while len(list(out.glob("jobs/*.json"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    kept = results(out)
    assert len(kept) >= 2
    assert not (out / "finetune.json").exists()
    assert call(monkeypatch, *command, str(len(kept) + 1)) == 0
    assert {name: job for name, job in results(out).items() if name in kept} == kept
    assert len(results(out)) == len(kept) + 1
    assert json.loads((out / "finetune.json").read_text())["rows"][0]["seeds"] == len(kept) + 1


def test_rates_can_be_compared_on_fewer_seeds(bert: Path, task: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rates": [1e-7, RATE], "seeds": 3, "tune": 1}
    record = tuned(bert, task, tmp_path, **keys)
    assert [(row["rate"], row["seeds"]) for row in record["rows"]] == [(1e-7, 1), (RATE, 3)]
    assert best(record)["rate"] == RATE
    again = finetune(bert, "sst2", task, tmp_path, recipe=SHORT, **keys)
    assert (again.finished, again.planned) == (4, 4)


def widen(bert: Path, data: Path, out: Path, score: Callable[[float], float | None], **keys: Any) -> list[Key]:
    """Every job in the order in which it was wanted, each by a new command; a rate's score is given by a function."""
    encoder, done = load_encoder(bert), list[Key]()
    request = Request(bert, "sst2", data, out, widen=True, **keys)
    while True:
        work = Finetuning(request, encoder, request.examples())
        work.open()
        work.settle()
        if not (missing := work.missing()):
            judged = work.judged()
            assert (judged.finished, judged.planned) == (len(done), len(done))
            return done
        rate, seed = missing[0]
        reached = score(rate)
        work.keep({"rate": rate, "seed": seed, "scores": None if reached is None else {"accuracy": reached}})
        done.append((rate, seed))


def peak_at(best: float) -> Callable[[float], float]:
    return lambda rate: 0.9 - 0.01 * abs(math.log2(rate / best))


def test_a_grid_is_widened_until_its_best_rate_is_inside(bert: Path, little: Path, tmp_path: Path) -> None:
    up = widen(bert, little, tmp_path / "up", peak_at(4e-4), rates=[1e-4, 2e-4], tune=1)
    assert up == [(1e-4, 0), (2e-4, 0), (4e-4, 0), (8e-4, 0), (4e-4, 1), (4e-4, 2)]
    assert not best(json.loads((tmp_path / "up" / "finetune.json").read_text()))["edge"]
    down = widen(bert, little, tmp_path / "down", peak_at(5e-5), rates=[2e-4, 1e-4], seeds=2)
    assert down == [(rate, seed) for rate in (1e-4, 2e-4, 5e-5, 2.5e-5) for seed in (0, 1)]
    alone = widen(bert, little, tmp_path / "alone", peak_at(RATE), rates=[RATE], seeds=1)
    assert alone == [(RATE, 0), (RATE / 2, 0), (RATE * 2, 0)]
    inside = widen(bert, little, tmp_path / "inside", peak_at(2e-4), rates=[1e-4, 2e-4, 4e-4], seeds=1)
    assert inside == [(1e-4, 0), (2e-4, 0), (4e-4, 0)]
    perfect = widen(bert, little, tmp_path / "perfect", lambda _: 1.0, rates=[1e-4, 2e-4], seeds=1)
    assert perfect == [(1e-4, 0), (2e-4, 0), (5e-5, 0)]
    asleep = widen(
        bert, little, tmp_path / "asleep", lambda rate: 0.7 if rate > 7e-4 else 0.5, rates=[1e-4, 2e-4], seeds=1
    )
    assert [rate for rate, _ in asleep] == [1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3]  # equal scores: higher rates may learn


def test_a_widened_grid_ends(bert: Path, little: Path, tmp_path: Path) -> None:
    diverging = widen(bert, little, tmp_path / "all", lambda _: None, rates=[RATE], tune=1)
    assert diverging == [(RATE / 2**power, 0) for power in range(MOST + 1)]
    bounded = widen(bert, little, tmp_path / "bound", lambda rate: None if rate > 0.1 else rate, rates=[0.1], seeds=1)
    assert bounded == [(0.1, 0), (0.05, 0), (0.2, 0)]  # a rate that diverged is not the best, so the best is inside
    rising = widen(bert, little, tmp_path / "rising", lambda rate: rate, rates=[0.2], seeds=1)
    assert rising == [(0.2, 0), (0.1, 0), (0.4, 0), (0.8, 0)]  # a rate is at most 1
    falling = widen(bert, little, tmp_path / "falling", lambda rate: 1 - rate, rates=[RATE, 2 * RATE], tune=1, seeds=2)
    low = RATE / 2**MOST
    assert falling[2:] == [*((RATE / 2**power, 0) for power in range(1, MOST + 1)), (low, 1)]


def test_a_rate_that_diverges_on_a_later_seed_gives_way_to_the_next_best(
    bert: Path, little: Path, tmp_path: Path
) -> None:
    request = Request(bert, "sst2", little, tmp_path, rates=[1e-4, 2e-4], tune=1)
    work = Finetuning(request, load_encoder(bert), request.examples())
    work.open()
    for rate, seed, scores in ((1e-4, 0, 0.5), (2e-4, 0, 0.7), (2e-4, 1, None)):
        work.keep({"rate": rate, "seed": seed, "scores": None if scores is None else {"accuracy": scores}})
    assert work.missing() == [(1e-4, 1), (1e-4, 2)]
    for seed in (1, 2):
        work.keep({"rate": 1e-4, "seed": seed, "scores": {"accuracy": 0.6}})
    judged = work.judged()
    assert judged.record is not None
    assert (judged.finished, judged.planned) == (4, 4)
    assert (best(judged.record)["rate"], best(judged.record)["seeds"]) == (1e-4, 3)


def test_seeds_that_wait_for_a_wider_grid_are_counted(bert: Path, little: Path, tmp_path: Path) -> None:
    request = Request(bert, "sst2", little, tmp_path, rates=[1e-4, 2e-4], tune=1, widen=True)
    work = Finetuning(request, load_encoder(bert), request.examples())
    work.open()
    counts = []
    for rate, accuracy in ((1e-4, 0.5), (2e-4, 0.7), (4e-4, 0.6)):
        work.keep({"rate": rate, "seed": 0, "scores": {"accuracy": accuracy}})
        judged = work.judged()
        counts.append((judged.finished, judged.planned))
    assert counts == [(1, 4), (2, 5), (3, 5)]


def test_the_command_widens_the_grid_of_an_earlier_one(
    bert: Path, little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    options = ["--rate", str(RATE), "--seeds", "2", "--tune", "1", "--batch", "16"]
    command = ["finetune", str(bert), "--task", "sst2", "--data", str(little), "--out", str(out), "--device", "cpu"]
    assert call(monkeypatch, *command, *options) == 0
    before = results(out)
    assert len(before) == 2
    assert call(monkeypatch, *command, *options, "--widen") == 0
    assert {name: job for name, job in results(out).items() if name in before} == before
    record = json.loads((out / "finetune.json").read_text())
    tried = [row["rate"] for row in record["rows"]]
    assert len(tried) == 1 + MOST or min(tried) < best(record)["rate"] < max(tried)
    assert best(record)["seeds"] == 2


def test_several_at_once_come_to_the_same_numbers(bert: Path, little: Path, tmp_path: Path) -> None:
    other = make_bert(tmp_path / "other")  # the same architecture and tokenizer with other weights, and a wider model
    weights = load_file(other / "model.safetensors")
    save_file({name: 1.5 * value for name, value in weights.items()}, other / "model.safetensors", {"format": "pt"})
    models = [bert, other, make_bert(tmp_path / "wider", width=48)]

    def judged(out: Path, jobs: int) -> dict[str, Any]:
        keys: dict[str, Any] = {"rates": [RATE, 2 * RATE], "seeds": 2, "tune": 1, "widen": True}
        recipe = Recipe(batch=16, dropout=0.0)  # which is drawn for all at once
        requests = [Request(model, "sst2", little, out / model.name, recipe=recipe, **keys) for model in models]
        ended: list[Path] = []
        done = finetune_all(
            requests, device="cpu", jobs=jobs, console=QUIET, on_judged=lambda one, _: ended.append(one.model)
        )
        assert sorted(ended) == sorted(models)
        found = {model.name: results(out / model.name) for model in models}
        counts = [len(kept) for kept in found.values()]
        assert min(counts) > 3  # of two rates, the best is at an edge
        assert [(one.finished, one.planned) for one in done] == [(count, count) for count in counts]
        return found

    alone, together = judged(tmp_path / "one", 1), judged(tmp_path / "six", 6)
    first, second = f"{RATE!r}-0.json", f"{2 * RATE!r}-0.json"
    assert len({alone[name][first]["loss"] for name in alone}) == 3
    for model in alone:
        assert alone[model].keys() == together[model].keys()
        for name, job in alone[model].items():
            assert together[model][name]["loss"] == pytest.approx(job["loss"], abs=1e-5)
            assert together[model][name]["scores"] == job["scores"]
    counts = {model: [together[model][name]["at_once"] for name in (first, second)] for model in alone}
    assert counts == {bert.name: [4, 4], "other": [4, 4], "wider": [2, 2]}
    assert judged(tmp_path / "six", 6) == together  # told of again, with nothing left to do


def test_more_at_once_than_examples(bert: Path, little: Path, tmp_path: Path) -> None:
    recipe = Recipe(batch=2, examples=3, dropout=0.0)  # batches of two and of one
    found = []
    for count in (1, 5):
        record = tuned(bert, little, tmp_path / str(count), rates=[RATE], seeds=5, jobs=count, recipe=recipe)
        assert [job["at_once"] for job in record["jobs"]] == [count] * 5
        found.append([job["loss"] for job in record["jobs"]])
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_several_at_once_stop_when_asked(
    bert: Path, little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(batch=1, epochs=100_000)
    step, made = Steps.__call__, []

    def step_and_stop(self: Steps, *arguments: Any) -> None:
        made.append(arguments)
        if len(made) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        step(self, *arguments)

    monkeypatch.setattr(Steps, "__call__", step_and_stop)
    keys: dict[str, Any] = {"recipe": recipe, "rates": [RATE, 2 * RATE], "seeds": 1, "jobs": 2}
    done = finetune(bert, "sst2", little, tmp_path, **keys)
    assert (done.finished, done.planned, done.record, len(made)) == (0, 2, None, 3)


def test_several_that_end_while_asked_to_stop_are_kept(
    bert: Path, little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, made = Steps.__call__, []

    def step_and_stop(self: Steps, *arguments: Any) -> None:
        step(self, *arguments)
        made.append(arguments)
        if len(made) == 1:  # the only step there is
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Steps, "__call__", step_and_stop)
    keys: dict[str, Any] = {"recipe": Recipe(batch=1000, epochs=1), "rates": [RATE, 2 * RATE], "jobs": 2}
    done = finetune(bert, "sst2", little, tmp_path, seeds=2, **keys)
    assert (done.finished, done.planned, len(made)) == (2, 4, 1)


def test_jobs_that_start_alike_are_read_once(
    bert: Path, little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier, read = Encoder.classifier, []

    def note(self: Encoder, *arguments: Any) -> Any:
        read.append(self.folder.path)
        return classifier(self, *arguments)

    monkeypatch.setattr(Encoder, "classifier", note)
    record = tuned(bert, little, tmp_path, rates=[RATE, 2 * RATE, 3 * RATE], seeds=2, jobs=6)
    assert (len(record["jobs"]), read) == (6, [bert, bert])
    assert len({job["loss"] for job in record["jobs"]}) == 6


def test_one_of_several_diverges_and_the_others_do_not_notice(
    bert: Path, little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, step, made = Recipe(batch=16, dropout=0.0), Steps.__call__, []
    (alone,) = tuned(bert, little, tmp_path / "alone", rates=[RATE], seeds=1, recipe=recipe)["jobs"]

    def step_and_spoil(self: Steps, *arguments: Any) -> None:
        made.append(arguments)
        if len(made) == 3:
            with torch.no_grad():
                self._weights[0][1].fill_(torch.nan)
        step(self, *arguments)

    monkeypatch.setattr(Steps, "__call__", step_and_spoil)
    record = tuned(bert, little, tmp_path / "both", rates=[RATE, 2 * RATE], seeds=1, jobs=2, recipe=recipe)
    good, bad = record["jobs"]
    assert (good["at_once"], good["diverged"], good["scores"]) == (2, None, alone["scores"])
    assert good["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    assert (bad["at_once"], bad["diverged"], bad["scores"], bad["loss"]) == (2, 2, None, None)


@pytest.mark.parametrize("kind", ["roformer", "fnet"])  # another kind of layer; padding changes the outputs
def test_models_that_cannot_be_joined_are_tuned_one_by_one(
    kind: str, little: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {"embedding_size": 8, "num_attention_heads": 2} if kind == "roformer" else {}
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(stock_tokenizer()),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        max_position_embeddings=24,
        **heads,
    )
    save(AutoModelForMaskedLM.from_config(config), stock_tokenizer(), tmp_path / "model")
    request = Request(tmp_path / "model", "sst2", little, tmp_path / "out", recipe=SHORT, rates=[RATE], seeds=2)
    finetune_all([request], device="cpu", jobs=2, console=Console(width=200))
    said = f"cannot make 2 fine-tunings at once: models of type {kind} cannot be joined; going on with 1"
    assert said in capsys.readouterr().out
    assert [job["at_once"] for job in results(tmp_path / "out").values()] == [1, 1]


def test_fewer_at_once_where_memory_is_short(
    bert: Path, little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Tuning.run

    def lacking(self: Tuning, jobs: Any, *arguments: Any) -> Any:
        if len(jobs) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, jobs, *arguments)

    monkeypatch.setattr(Tuning, "run", lacking)
    request = Request(bert, "sst2", little, tmp_path, recipe=SHORT, rates=[RATE], seeds=3)
    (done,) = finetune_all([request], device="cpu", jobs=3, console=Console(width=200))
    assert (done.finished, done.planned) == (3, 3)
    said = "cannot make 3 fine-tunings at once: the GPU lacks the memory; going on with 1"
    assert said in capsys.readouterr().out


def test_a_run_is_judged_by_its_export(store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "model": {"size": "tiny", "layers": 2, "width": 16, "heads": 4, "head_size": 4, "mlp": 16},
        "method": {"name": "full"},
        "data": {"source": str(store.path), "length": 16, "vocabulary": 600},
        "optimizer": {"peak": 0.01, "warmup": 1},
        "train": {"steps": 2, "batch": 4, "eval_samples": 8, "device": "cpu"},
    }
    run = tmp_path / "hamlet"
    pretrain(Config.read(config), run, console=QUIET)
    data = make_task(tmp_path / "task", opinions(40, 0), opinions(40, 1))
    monkeypatch.chdir(tmp_path)
    done = finetune(run, "sst2", data, rates=[RATE], seeds=1, recipe=SHORT)
    assert done.folder == Path("runs/finetune/hamlet-sst2")
    assert done.record is not None
    assert done.record["model"]["type"] == "roberta-prelayernorm"
    noted = read_scores(run)["SST-2"]
    assert noted["score"] == best(done.record)["means"]["accuracy"]
    assert noted["constant"] == done.record["baseline"]["accuracy"]
    made = (run / "export" / "model.safetensors").stat().st_mtime_ns
    again = finetune(run / "export", "sst2", data, rates=[RATE], seeds=1, recipe=SHORT)
    assert (again.folder, again.record) == (done.folder, done.record)
    assert (run / "export" / "model.safetensors").stat().st_mtime_ns == made

    written = run / "export" / "config.json"
    facts = written.read_text().replace('"hidden_size": 16', '"hidden_size": 17')
    for older in (facts.replace('"raptr_step": 2', '"raptr_step": 1'), facts.replace('"raptr_step": 2,', "")):
        written.write_text(older)  # later than the checkpoint, as in a folder that was copied
        assert load_encoder(run).folder.config.hidden_size == 16  # written anew


def test_another_family_of_encoders(task: Path, tmp_path: Path) -> None:
    config = DistilBertConfig(
        vocab_size=len(stock_tokenizer()), dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=24
    )
    folder = tmp_path / "distilbert"
    folder.mkdir()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save(DistilBertForMaskedLM(config), stock_tokenizer(), folder)
    record = tuned(folder, task, tmp_path / "out", rates=[2e-3], seeds=1)
    assert best(record)["means"]["accuracy"] > 0.9
    assert record["recipe"]["dropout_settings"] == ["dropout", "attention_dropout", "seq_classif_dropout"]


def test_a_space_before_each_text(bert: Path) -> None:
    encoder = load_encoder(bert)
    encoder.folder.tokenizer.backend_tokenizer.pre_tokenizer = None  # so that the space is seen
    coded = [tokenize(encoder, [("film",)], 8, leading_space=leading)[0][0]["input_ids"] for leading in (False, True)]
    unknown = encoder.folder.tokenizer.unk_token_id
    assert [unknown in ids for ids in coded] == [False, True]


def test_the_command(
    bert: Path, little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    options = ["--rate", "1e-3", "--seeds", "2", "--epochs", "1", "--device", "cpu"]
    assert call(monkeypatch, "finetune", str(bert), "--task", "SST-2", "--data", str(little), *options) == 0
    shown = capsys.readouterr()
    assert "small on sst2" in shown.out
    assert "constant" in shown.out
    assert "finetune.json" in shown.err
    assert (tmp_path / "runs" / "finetune" / "small-sst2" / "finetune.json").is_file()
    assert call(monkeypatch, "finetune", str(bert), "--task", "wnli", "--data", str(little)) == 2
    assert "--task is 'wnli'; did you mean 'qnli'?" in capsys.readouterr().err


def test_other_settings_in_the_same_folder_are_refused(bert: Path, little: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tuned(bert, little, out, rates=[RATE], seeds=1)
    with pytest.raises(ValueError, match=r"recipe\.epochs: was 3, now 1.*--out"):
        tuned(bert, little, out, rates=[RATE], seeds=1, recipe=Recipe(batch=16, epochs=1))
    with pytest.raises(ValueError, match=r"model\.sha256.*--out"):
        tuned(make_bert(tmp_path / "small", width=16), little, out, rates=[RATE], seeds=1)
    other = make_task(tmp_path / "task", opinions(64, 0), opinions(41, 1))
    with pytest.raises(ValueError, match=r"data\.dev\.examples: was 40, now 41"):
        tuned(bert, other, out, rates=[RATE], seeds=1)
    (out / "jobs" / f"{RATE!r}-0.json").write_text("{")
    with pytest.raises(ValueError, match=r"0\.001-0\.json is damaged"):
        tuned(bert, little, out, rates=[RATE], seeds=1)
    (out / "jobs" / f"{RATE!r}-0.json").write_text("{}")
    with pytest.raises(ValueError, match=r"0\.001-0\.json is damaged.*remove"):
        tuned(bert, little, out, rates=[RATE], seeds=1)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rates": [0.0]}, r"--rate is 0\.0"),
        ({"rates": [float("nan")]}, r"--rate is nan"),
        ({"rates": [2.0]}, r"--rate is 2\.0"),
        ({"seeds": 0}, r"--seeds is 0"),
        ({"seeds": 10**12}, r"--seeds is 10+;.*1 to 1000"),
        ({"label": ""}, r"--label is ''; the name of a column"),
        ({"texts": [""]}, r"--text is ''"),
        ({"dev": ""}, r"--dev is ''; the name of a file"),
        ({"jobs": 0}, r"--jobs is 0"),
        ({"tune": 0}, r"--tune is 0"),
        ({"tune": 4}, r"--tune is 4.*3"),
        ({"device": "tpu"}, r"--device is 'tpu'"),
        ({"device": "cuda"}, r"--device is cuda.*no GPU"),
    ],
)
def test_settings_that_are_refused(
    settings: dict[str, Any], match: str, bert: Path, little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=match):
        finetune(bert, "sst2", little, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("batch", 0),
        ("examples", 0),
        ("length", 7),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("warmup", 7.0),
        ("warmup", -0.1),
        ("clip", 0.0),
        ("clip", -1.0),
    ],
)
def test_recipes_that_are_refused(name: str, value: float) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"--{name} is {value}"):
        Recipe(**settings)


def test_a_decoder_is_refused(tmp_path: Path, little: Path) -> None:
    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    folder = tmp_path / "llama"
    folder.mkdir()
    save(LlamaForCausalLM(config), stock_tokenizer(), folder)
    with pytest.raises(ValueError, match=r"llama is a decoder \(llama\)"):
        finetune(folder, "sst2", little, tmp_path / "out")
    with pytest.raises(ValueError, match="is a decoder"):
        load_encoder(make_bert(tmp_path / "causal", is_decoder=True))


def test_a_model_with_a_trained_head_is_refused(bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    folder.mkdir()
    save(load_encoder(bert).classifier(2, 0.1), stock_tokenizer(), folder)
    with pytest.raises(ValueError, match=r"fine-tuned already \(BertForSequenceClassification\)"):
        load_encoder(folder)


def test_a_lack_of_memory_is_a_sentence(
    bert: Path, little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Tuning, "run", lacking)
    with pytest.raises(ValueError, match=r"out of memory.*--batch"):
        tuned(bert, little, tmp_path, rates=[RATE], seeds=1)


def test_folders_that_hold_no_encoder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.*not a folder"):
        load_encoder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json"):
        load_encoder(tmp_path)
    model = make_bert(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"no weights for \d+ tensors.*encoder\.layer\.2"):
        load_encoder(model).classifier(2, 0.1)
    (model / "config.json").write_text(json.dumps({**config, "model_type": "vit"}))
    with pytest.raises(ValueError, match=r"type vit.*no sequence classifier"):
        load_encoder(model)
    (model / "config.json").write_text(json.dumps({**config, "model_type": "unheard"}))
    with pytest.raises(ValueError, match=r"cannot be loaded.*unheard"):
        load_encoder(model)
    (model / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_encoder(model)
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(ValueError, match=r"layer\.0\..*has the shape \(64,.*config\.json.*\(48,"):
        load_encoder(model).classifier(2, 0.1)
    whole = (model / "model.safetensors").read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:100], b""):
        (model / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
            load_encoder(model)


def test_a_tokenizer_without_padding_is_refused(tmp_path: Path) -> None:
    model = make_bert(tmp_path / "model")
    facts = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in facts.items() if k != "pad_token"}))
    with pytest.raises(ValueError, match="padding token"):
        load_encoder(model)


def test_a_folder_that_is_no_fine_tuning_is_refused(bert: Path, little: Path, tmp_path: Path) -> None:
    for number, name in enumerate(("notes.txt", "finetune.json", "jobs/small/causal-boolq-1.json")):
        out = tmp_path / str(number)
        path = out / name
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        with pytest.raises(ValueError, match=f"a folder without a fine-tuning that holds {name.partition('/')[0]}"):
            tuned(bert, little, out, rates=[RATE], seeds=1)
        assert [path] == [one for one in out.rglob("*") if one.is_file()]
        assert path.read_text() == "{}"
    out = tmp_path / "own"
    tuned(bert, little, out, rates=[RATE], seeds=1)
    (out / "notes.txt").write_text("mine")  # beside a fine-tuning, anything may lie
    tuned(bert, little, out, rates=[RATE], seeds=2)
    (out / "settings.json").write_text("[]")
    with pytest.raises(ValueError, match=r"settings\.json is damaged.*remove"):
        tuned(bert, little, out, rates=[RATE], seeds=2)


def test_two_commands_in_one_folder_are_refused(bert: Path, little: Path, tmp_path: Path) -> None:
    with files.locked(tmp_path / ".lock", "held"), pytest.raises(ValueError, match=r"another process.*--out"):
        finetune(bert, "sst2", little, tmp_path)


def test_a_dev_file_of_choice(bert: Path, little: Path, tmp_path: Path) -> None:
    data = make_task(tmp_path / "task", opinions(64, 0), opinions(40, 1))
    write_jsonl(data / "hard.jsonl", opinions(10, 5))
    record = tuned(bert, data, tmp_path / "out", rates=[RATE], seeds=1, dev="hard")
    assert record["data"]["dev"]["file"] == "hard.jsonl"
    assert record["data"]["dev"]["examples"] == 10
