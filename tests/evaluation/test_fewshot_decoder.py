"""Likelihoods and greedy answers against lm-eval's own model and against plain forward passes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the extra eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from raptr.evaluation.fewshot.decoder import Attention, Decoder, Scorer, load_decoder, prefix_mask
from raptr.train.safety import StopRequest

PROMPTS = [
    "the film is fine\nQuestion: is it good?\nAnswer:",
    "a story of men who sing\nQuestion: is it good?\nAnswer:",
    "Q: capital of spain?\nA:",
]
ANSWERS = [" yes", " no", " the film is", " madrid"]
UNTIL = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}


def scorer(decoder: Decoder, attention: Attention = "causal", batch: int = 4) -> Scorer:
    return Scorer(decoder, decoder.weights(torch.device("cpu")), attention, batch=batch, stop=StopRequest())


def asked(kind: Any, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


PAIRS = [(prompt, answer) for prompt in PROMPTS for answer in ANSWERS]


def test_causal_scores_are_those_of_lm_eval(taught: Path) -> None:
    decoder = load_decoder(taught)
    own = scorer(decoder)
    theirs = HFLM(
        pretrained=decoder.weights(torch.device("cpu")),
        tokenizer=decoder.folder.tokenizer,  # type: ignore[arg-type]
        batch_size=2,
        max_length=96,
    )
    expected = theirs.loglikelihood(asked("loglikelihood", PAIRS), disable_tqdm=True)
    found = own.loglikelihood(asked("loglikelihood", PAIRS))
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    texts = [(prompt, dict(UNTIL)) for prompt in PROMPTS]
    answers = own.generate_until(asked("generate_until", texts))
    assert answers == theirs.generate_until(asked("generate_until", texts), disable_tqdm=True)
    assert answers[2] == " madrid"


def plain_prefix(decoder: Decoder, prompt: str, ids: list[int]) -> torch.Tensor:
    """The scores after a prompt and some tokens, one sequence without padding or cache."""
    model, head = decoder.weights(torch.device("cpu")), [decoder.mode, *decoder.folder.tokenizer.encode(prompt)]
    row = torch.tensor([head + ids])
    length, prefix = row.shape[1], len(head)
    mask = torch.ones(length, length).tril().bool()
    mask[:, :prefix] = True
    with torch.no_grad():
        logits: torch.Tensor = model(row, attention_mask=mask[None, None]).logits[0, prefix - 1 :]
    return logits


def test_prefix_scores_are_those_of_one_forward_pass(ul2: Path) -> None:
    decoder = load_decoder(ul2)
    assert decoder.mode == 3
    found = scorer(decoder, "prefix").loglikelihood(asked("loglikelihood", PAIRS))
    causal = scorer(decoder, "causal").loglikelihood(asked("loglikelihood", PAIRS))
    for (prompt, answer), (value, _), (other, _) in zip(PAIRS, found, causal, strict=True):
        ids = decoder.folder.tokenizer.encode(answer)
        logits = torch.log_softmax(plain_prefix(decoder, prompt, ids), -1)
        expected = sum(float(logits[place, token]) for place, token in enumerate(ids))
        assert value == pytest.approx(expected, abs=1e-4)
        assert value != pytest.approx(other, abs=1e-4)


def test_prefix_answers_are_those_of_single_steps(ul2: Path) -> None:
    decoder = load_decoder(ul2)
    tokenizer = decoder.folder.tokenizer
    expected = []
    for prompt in PROMPTS:
        ids: list[int] = []
        while len(ids) < 5 and tokenizer.decode(ids) != "\n" and (not ids or ids[-1] not in (1, 4)):
            ids.append(int(plain_prefix(decoder, prompt, ids)[-1].argmax()))
        expected.append(str(tokenizer.decode(ids, skip_special_tokens=True)).split("\n")[0])
    texts = [(prompt, dict(UNTIL)) for prompt in PROMPTS]
    assert scorer(decoder, "prefix").generate_until(asked("generate_until", texts)) == expected


def test_the_mask_of_a_prefix() -> None:
    mask = prefix_mask([1, 3], 4, torch.device("cpu"))
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert mask[1, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_a_prompt_that_is_too_long_loses_its_beginning_but_not_its_mode(ul2: Path, taught: Path) -> None:
    long = "the film " * 60
    for folder, first in ((ul2, [3]), (taught, [])):
        own = scorer(load_decoder(folder))
        kept = own._prompt(own.tok_encode(f"fine {long}good"), 10)
        assert len(kept) == 10
        assert kept[: len(first)] == first
        assert kept[-1] == own.tok_encode("a good")[-1]
        assert len(own.cut) == 1
    own = scorer(load_decoder(ul2), "prefix")
    (answer,) = own.generate_until(asked("generate_until", [(long, dict(UNTIL))]))
    assert isinstance(answer, str)
    found = own.loglikelihood(asked("loglikelihood", [(long, " fine"), ("film", long)]))
    assert all(value < 0 for value, _ in found)


def test_an_empty_prompt(taught: Path) -> None:
    ((value, _),) = scorer(load_decoder(taught)).loglikelihood(asked("loglikelihood", [("", "the film")]))
    assert value < 0


def test_a_tokenizer_without_an_end_is_refused(taught: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(taught, tmp_path / "endless")
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in facts.items() if k != "eos_token"}))
    with pytest.raises(ValueError, match=r"endless.*ends a text"):
        load_decoder(folder)


def test_a_vocabulary_for_ul2_alone_does_not_make_a_ul2_model(ul2: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(ul2, tmp_path / "causal")
    (folder / "README.md").write_text("---\ntags: [raptr, llama, causal]\n---\n")
    assert load_decoder(folder).attentions == ("causal",)
    assert load_decoder(folder, ["prefix"]).mode == 3
    (folder / "README.md").unlink()
    assert load_decoder(folder).mode is None
