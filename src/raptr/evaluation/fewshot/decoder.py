"""The decoder to be scored, as a model of lm-eval: likelihoods of answers, and greedy generation.

Attention is causal or, for models trained with UL2, over a prefix: the positions of the prompt see each other. Either
way the prompt of a UL2 model begins with the mode token of its S denoisers. A prompt that is too long loses its
beginning, except for a leading special token: the mode token, or one that the tokenizer puts there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from raptr.evaluation.encoder import is_decoder
from raptr.evaluation.folder import ModelFolder, open_folder, quiet, refuse_mismatched, refuse_missing
from raptr.objectives.specials import MODES
from raptr.train.safety import StopRequest

Attention = Literal["causal", "prefix"]
ATTENTIONS: tuple[Attention, ...] = ("causal", "prefix")
MODE = MODES[1]  # of S denoisers, which continue a text
UL2 = "ul2"  # the tag in an export's model card
ANSWER = 16  # the most tokens of an answer, if the task does not say


class Stopped(Exception):
    """Raised after SIGTERM or Ctrl-C in the middle of a job."""


@final
@dataclass(frozen=True)
class Decoder:
    """A decoder in a folder; `mode` is the token before its prompts, or None if it was not trained with UL2."""

    folder: ModelFolder
    mode: int | None

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The kinds of attention to score it with by default: both for a UL2 model."""
        return ATTENTIONS if self.mode is not None else ATTENTIONS[:1]

    def weights(self, device: torch.device) -> PreTrainedModel:
        """Load the model in float32 on the device."""
        path = self.folder.path
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=torch.float32,
                attn_implementation="sdpa",
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        model, loading = loaded
        refuse_mismatched(path, loading)
        refuse_missing(path, loading["missing_keys"], model)
        assert isinstance(model, PreTrainedModel)
        torch.nn.Module.to(model, device).eval()
        return model


def load_decoder(model: Path, attentions: Sequence[str] = ()) -> Decoder:
    """Load the decoder in a folder (for a run, its export); refuse one without the kinds of attention asked for."""
    folder = open_folder(model)
    if not is_decoder(folder.config):
        raise ValueError(
            f"{folder.path} is an encoder ({folder.config.model_type}); fewshot judges decoders. "
            "Use raptr finetune for it."
        )
    if folder.tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {folder.path} has no token that ends a text, at which answers stop")
    known = folder.tokenizer.get_vocab().get(MODE)
    if "prefix" in attentions and known is None:
        raise ValueError(
            f"--attention is prefix, but the tokenizer in {folder.path} has no {MODE}: the model was not trained with "
            "UL2. Use causal."
        )
    return Decoder(folder, known if "prefix" in attentions or UL2 in _tags(folder.path) else None)


def _tags(folder: Path) -> list[str]:
    """Return the tags of a model card, from its header between two lines of dashes."""
    card = folder / "README.md"
    parts = card.read_text(encoding="utf-8").split("---\n") if card.is_file() else []
    try:
        head = yaml.safe_load(parts[1]) if len(parts) > 2 else {}
    except yaml.YAMLError:
        return []
    tags = head.get("tags") if isinstance(head, dict) else None
    return [str(tag) for tag in tags] if isinstance(tags, list) else []


def prefix_mask(prefixes: Sequence[int], width: int, device: torch.device) -> Tensor:
    """Return a mask, True where position q sees k: k <= q, or both in their row's prefix; (rows, 1, width, width)."""
    place = torch.arange(width, device=device)
    prefix = torch.tensor(prefixes, device=device).view(-1, 1, 1, 1)
    return (place <= place[:, None]) | (place < prefix)


@final
class Scorer(TemplateLM):
    """A decoder with one kind of attention, as a model of lm-eval; `cut` holds the prompts that were too long."""

    backend = "causal"

    def __init__(
        self,
        decoder: Decoder,
        model: PreTrainedModel,
        attention: Attention,
        *,
        batch: int,
        stop: StopRequest,
        on_requests: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._decoder, self._model, self._prefix = decoder, model, attention == "prefix"
        self._batch, self._stop, self._done = batch, stop, on_requests
        self._tokens = decoder.folder.tokenizer  # not named `tokenizer`, which lm-eval uses for chats
        self._longest = decoder.folder.longest()
        pad = self._tokens.pad_token_id
        self._pad = self.eot_token_id if pad is None else pad
        self.cut: set[tuple[int, ...]] = set()

    @property
    def eot_token_id(self) -> int:
        return int(self._tokens.eos_token_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return a text's tokens, with those that the tokenizer puts before it but without an end token after it."""
        ids: list[int] = self._tokens.encode(string, add_special_tokens=add_special_tokens is not False)
        end = self._tokens.eos_token_id
        return ids[:-1] if len(ids) > 1 and ids[-1] == end and not string.endswith(self._tokens.eos_token) else ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether it is the likeliest, without lm-eval's bar."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Raise NotImplementedError, since no task here needs it."""
        raise NotImplementedError

    def _prompt(self, context: list[int], room: int) -> list[int]:
        """Return the context after its mode token, cut at the beginning to `room` tokens."""
        whole = context if self._decoder.mode is None else [self._decoder.mode, *context]
        if len(whole) <= room:
            return whole
        self.cut.add(tuple(context))
        kept = whole[:1] if whole[0] in self._tokens.all_special_ids else []
        return kept + whole[len(whole) - (room - len(kept)) :] if room > len(kept) else kept

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        rows = []
        for _, context, continuation in requests:
            answer = continuation[: self._longest]
            rows.append((self._prompt(context, self._longest + 1 - len(answer)), answer))
        results: dict[int, tuple[float, bool]] = {}
        for places in self._batches([sum(map(len, row)) for row in rows]):
            for place, logits in zip(places, self._logits([rows[place] for place in places]), strict=True):
                target = torch.tensor(rows[place][1], device=logits.device)
                chosen = torch.log_softmax(logits, -1).gather(1, target[:, None])
                results[place] = float(chosen.sum()), bool((logits.argmax(-1) == target).all())
        return [results[place] for place in range(len(rows))]

    def _logits(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[Tensor]:
        """Return the logits at the positions that predict each row's answer."""
        inputs = [(prompt + answer)[:-1] for prompt, answer in rows]
        width = max(map(len, inputs))
        device = self._model.device
        ids = torch.tensor([row + [self._pad] * (width - len(row)) for row in inputs], device=device)
        prompts = [len(prompt) for prompt, _ in rows]
        mask = {"attention_mask": prefix_mask(prompts, width, device)} if self._prefix else {}
        logits = self._model(ids, **mask, use_cache=False).logits.float()
        return [
            logits[place, prompts[place] - 1 : prompts[place] - 1 + len(rows[place][1])] for place in range(len(rows))
        ]

    @torch.no_grad()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return each prompt's greedy continuation, up to the first of the strings to stop at."""
        rows = []
        for context, options in (request.args for request in requests):
            new = min(options.get("max_gen_toks", ANSWER), self._longest // 2)
            rows.append((self._prompt(self.tok_encode(context), self._longest - new), new, list(options["until"])))
        results: dict[int, str] = {}
        for places in self._batches([len(prompt) for prompt, _, _ in rows]):
            new, until = rows[places[0]][1], rows[places[0]][2]
            assert all(rows[place][1:] == (new, until) for place in places)  # the requests are of one task
            texts = self._written([rows[place][0] for place in places], new, until)
            results |= zip(places, texts, strict=True)
        return [results[place] for place in range(len(rows))]

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield batches of indices of rows with these lengths, the longest first; raise `Stopped` if asked to stop."""
        order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
        for start in range(0, len(order), self._batch):
            if self._stop.asked:
                raise Stopped
            yield order[start : start + self._batch]
            self._done(len(order[start : start + self._batch]))

    def _written(self, prompts: Sequence[list[int]], new: int, until: list[str]) -> list[str]:
        width, device = max(map(len, prompts)), self._model.device
        ids = torch.tensor([[self._pad] * (width - len(row)) + row for row in prompts], device=device)
        present = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=device)
        cache = DynamicCache()
        if self._prefix and width > 1:
            # Positions of a prompt see each other. A padding position sees only itself, and no other position sees it.
            seen = (present[:, None, None, :] & present[:, None, :, None]).bool() | torch.eye(
                width, dtype=torch.bool, device=device
            )
            places = (present.cumsum(1) - 1).clamp(min=0)
            self._model(ids, attention_mask=seen, position_ids=places, past_key_values=cache)
            cache.crop(-1)  # `generate` starts from the prompt's last token
        ends = _Ends(self._tokens, width, until)
        generate: Any = self._model.generate
        out = generate(
            ids,
            attention_mask=present,
            past_key_values=cache,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=self._pad,
            eos_token_id=self.eot_token_id,
            stopping_criteria=StoppingCriteriaList([ends]),
        )
        return [ends.answer(row) for row in out]


@final
class _Ends(StoppingCriteria):
    """Stops a row once one of the strings `until` occurs in what was written after the prompt."""

    def __init__(self, tokenizer: Any, prompt: int, until: Sequence[str]) -> None:
        self._tokenizer, self._prompt, self._until = tokenizer, prompt, until

    def _text(self, row: Tensor) -> str:
        return str(self._tokenizer.decode(row[self._prompt :], skip_special_tokens=True))

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        ended = [any(stop in self._text(row) for stop in self._until) for row in input_ids]
        return torch.tensor(ended, device=input_ids.device)

    def answer(self, row: Tensor) -> str:
        """Return what was written before the first of the strings to stop at."""
        text = self._text(row)
        return text[: min((place for stop in self._until if (place := text.find(stop)) >= 0), default=len(text))]
