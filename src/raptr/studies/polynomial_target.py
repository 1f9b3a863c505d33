"""Polynomials on the cube {±1}^d, hashed points to learn them from, and the errors of what was learnt (section 3).

- The subsets of a degree are distinct; otherwise a perfect fit would not have error 0.
- Labels are exact: F* depends on few variables, so all its values are in a table, the Walsh transform of its
  coefficients.
- Inputs are hashed on the device from (seed, step, sample), bit for bit as `raptr.hashing` does. So they are the same
  for every method, on every machine, and whichever runs are trained together.
- c - ĉ = E[(F* - F) · Π x_i] is estimated from the residual on a fixed sample of N points. An estimate of ĉ from F
  alone would have noise E[F²] / N in each component, even at a perfect fit; this estimate has E[(F* - F)²] / N, which
  is 0 at a perfect fit. The noise is not subtracted: `Evaluation.noise` is how much an error owes to sampling, per
  unit of loss.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raptr.hashing import FIRST, GOLDEN, SECOND, STREAMS, Stream, bits_array, mix
from raptr.models.init import normal

TARGET, INPUTS = 0, 1  # first counter of the hash, so that the draws of subsets and inputs are independent
WORD = 64  # coordinates per hashed word
CHUNK = 2048  # samples evaluated at once


@dataclass(frozen=True)
class Target:
    """The polynomial F* of one seed."""

    variables: int
    degrees: int
    terms: int
    seed: int

    def __post_init__(self) -> None:
        for degree in range(1, self.degrees + 1):
            if math.comb(self.variables, degree) < self.terms:
                raise ValueError(
                    f"terms is {self.terms}; degree {degree} of {self.variables} variables has only "
                    f"{math.comb(self.variables, degree)} distinct subsets"
                )

    @cached_property
    def subsets(self) -> NDArray[np.uint64]:
        """The subsets of the terms as bit masks, (degrees, terms): for each degree those with the lowest hashes."""
        masks = np.arange(1 << self.variables, dtype=np.uint64)
        sizes, hashed = np.bitwise_count(masks), bits_array(self.seed, "data", np.array(TARGET, dtype=np.uint64), masks)
        by_degree = [masks[sizes == degree] for degree in range(1, self.degrees + 1)]
        return np.stack([group[np.argsort(hashed[group], kind="stable")[: self.terms]] for group in by_degree])

    @cached_property
    def coefficients(self) -> NDArray[np.float64]:
        """The coefficients c of the terms, (degrees, terms)."""
        drawn = normal(self.seed, "polynomial", self.degrees * self.terms)
        return drawn.astype(np.float64).reshape(self.degrees, self.terms)

    def table(self) -> NDArray[np.float64]:
        """Return F* at every point, (2^variables,): entry n is the point whose x_i is -1 where bit i of n is set."""
        values = np.zeros(1 << self.variables)
        values[self.subsets.ravel()] = self.coefficients.ravel()
        for bit in range(self.variables):
            low, high = (half for half in values.reshape(-1, 2, 1 << bit).swapaxes(0, 1))
            low[:], high[:] = low + high, low - high
        return values


def hashed(start: Tensor, *counters: Tensor) -> Tensor:
    """Compute `raptr.hashing.bits` on the device, from its `start` state and int64 counters, which are broadcast."""
    state = start
    for counter in counters:
        state = _mix(state ^ _mix(counter))
    return state


def start_of(seeds: Sequence[int], stream: Stream, device: str) -> Tensor:
    """Return the state of `raptr.hashing.bits` before its counters, for every seed: (seeds, 1, 1)."""
    return torch.tensor([_signed(mix(mix(seed) ^ STREAMS[stream])) for seed in seeds], device=device).view(-1, 1, 1)


def _mix(z: Tensor) -> Tensor:
    z = z + _signed(GOLDEN)
    z = (z ^ _shifted(z, 30)) * _signed(FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)  # shifting a signed integer copies its sign bit


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@final
class Points:
    """Hashed points of the cube {±1}^inputs, each with its index into `Target.table`."""

    def __init__(
        self, seeds: Sequence[int], stream: Stream, *, samples: int, inputs: int, variables: int, device: str
    ) -> None:
        assert variables <= min(inputs, WORD)
        self._inputs, self._numbered = inputs, (1 << variables) - 1
        words = -(-inputs // WORD)
        self._counter = torch.arange(samples * words, device=device).view(samples, words)
        self._bits = torch.arange(WORD, device=device)
        # All constants are created here, since a CUDA graph cannot capture a copy from the host.
        self._start = hashed(start_of(seeds, stream, device), torch.full((1,), INPUTS, device=device))

    def at(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of a step and their indices into the table.

        The inputs are ±1 as int64, (seeds, samples, inputs); the indices are (seeds, samples).
        """
        words = hashed(self._start, step, self._counter)
        signs = 1 - 2 * ((words.unsqueeze(3) >> self._bits) & 1)
        return signs.flatten(2)[:, :, : self._inputs], words[:, :, 0] & self._numbered


@final
class Evaluation:
    """The loss and the error per degree of many runs, on one fixed sample that all seeds and methods share.

    `tables` (seeds, 2^variables) holds F* of the `targets`; run r learns target `owner[r]`.
    """

    def __init__(self, targets: Sequence[Target], tables: Tensor, owner: Tensor, *, samples: int, inputs: int) -> None:
        variables, device = targets[0].variables, str(tables.device)
        self._tables, self._owner, self._samples, self._targets = tables, owner, samples, targets
        points = Points([0], "evaluation", samples=samples, inputs=inputs, variables=variables, device=device)
        signs, numbers = points.at(torch.zeros(1, dtype=torch.int64, device=device))
        self._inputs, self._numbers = signs[0].to(tables.dtype), numbers[0]
        subsets = np.stack([target.subsets.ravel() for target in targets])[:, None, :]
        members = subsets >> np.arange(variables, dtype=np.uint64)[:, None] & np.uint64(1)
        self._members = torch.from_numpy(members.astype(np.float64)).to(tables)  # (seeds, variables, all terms)
        squares = np.stack([(target.coefficients**2).sum(1) for target in targets])
        self._squares = torch.from_numpy(squares).to(tables)[owner]  # (runs, degrees)
        self.noise = targets[0].terms / samples / self._squares

    @torch.no_grad()
    def __call__(self, forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return losses (runs,) and errors (runs, degrees).

        `forward` maps inputs (runs, batch, inputs) to outputs (runs, batch).
        """
        runs, target = len(self._owner), self._targets[0]
        losses = self._tables.new_zeros(runs)
        gaps = self._tables.new_zeros(runs, target.degrees * target.terms)
        for start in range(0, self._samples, CHUNK):
            x, numbers = self._inputs[start : start + CHUNK], self._numbers[start : start + CHUNK]
            residual = self._tables[:, numbers][self._owner] - forward(x.expand(runs, -1, -1))
            losses += residual.square().sum(1)
            negative = (1 - x[:, : target.variables]) / 2
            for seed, members in enumerate(self._members):
                characters = 1 - 2 * (negative @ members % 2)
                of_seed = self._owner == seed
                gaps[of_seed] += residual[of_seed] @ characters
        errors = (gaps / self._samples).square().view(runs, target.degrees, target.terms).sum(2)
        return losses / self._samples, errors / self._squares
