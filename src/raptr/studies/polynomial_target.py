"""Polynomials on the cube {±1}^d, hashed points of it, and how well functions have learnt them (section 3).

- The subsets of a degree are distinct; else a perfect fit would not have error 0.
- Labels are exact: F* depends on few variables, so it is a table, the Walsh transform of its coefficients.
- Inputs are hashed on the device from (seed, step, sample): the same for every method and on every machine,
  whatever is trained together, bit for bit those of `raptr.hashing`.
- c - ĉ = E[(F* - F) · Π x_i] is estimated from the residual on a fixed sample of N points. An estimate of ĉ from F
  alone has noise E[F²] / N in each component even at a perfect fit; this one E[(F* - F)²] / N, and 0 at a perfect
  fit. Nothing is subtracted: `Evaluation.noise` is what sampling adds to an error, per unit of loss.
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

TARGET, INPUTS = 0, 1  # the first counter of the hash, so that subsets and inputs draw independently
WORD = 64  # coordinates in a hashed word
CHUNK = 2048  # samples evaluated at once


@dataclass(frozen=True)
class Target:
    """F* of one seed."""

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
        """The terms' subsets as bit masks, (degrees, terms): of each degree those with the lowest hash."""
        masks = np.arange(1 << self.variables, dtype=np.uint64)
        sizes, hashed = np.bitwise_count(masks), bits_array(self.seed, "data", np.array(TARGET, dtype=np.uint64), masks)
        by_degree = [masks[sizes == degree] for degree in range(1, self.degrees + 1)]
        return np.stack([some[np.argsort(hashed[some], kind="stable")[: self.terms]] for some in by_degree])

    @cached_property
    def coefficients(self) -> NDArray[np.float64]:
        """c, (degrees, terms)."""
        drawn = normal(self.seed, "polynomial", self.degrees * self.terms)
        return drawn.astype(np.float64).reshape(self.degrees, self.terms)

    def table(self) -> NDArray[np.float64]:
        """F* at every point: entry n has x_i = -1 where bit i of n is set."""
        values = np.zeros(1 << self.variables)
        values[self.subsets.ravel()] = self.coefficients.ravel()
        for bit in range(self.variables):
            low, high = (half for half in values.reshape(-1, 2, 1 << bit).swapaxes(0, 1))
            low[:], high[:] = low + high, low - high
        return values


def hashed(start: Tensor, *counters: Tensor) -> Tensor:
    """`raptr.hashing.bits` on the device, from its `start` state and int64 counters, broadcast against each other."""
    state = start
    for counter in counters:
        state = _mix(state ^ _mix(counter))
    return state


def start_of(seeds: Sequence[int], stream: Stream, device: str) -> Tensor:
    """The state of `raptr.hashing.bits` before its counters, for every seed, (seeds, 1, 1)."""
    return torch.tensor([_signed(mix(mix(seed) ^ STREAMS[stream])) for seed in seeds], device=device).view(-1, 1, 1)


def _mix(z: Tensor) -> Tensor:
    z = z + _signed(GOLDEN)
    z = (z ^ _shifted(z, 30)) * _signed(FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)  # a shift of signed integers drags the sign along


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@final
class Points:
    """Hashed points of the cube {±1}^inputs, each with its number among the 2^variables that F* tells apart."""

    def __init__(
        self, seeds: Sequence[int], stream: Stream, *, samples: int, inputs: int, variables: int, device: str
    ) -> None:
        assert variables <= min(inputs, WORD)
        self._inputs, self._numbered = inputs, (1 << variables) - 1
        words = -(-inputs // WORD)
        self._counter = torch.arange(samples * words, device=device).view(samples, words)
        self._bits = torch.arange(WORD, device=device)
        # All constants are made before a CUDA graph is captured: a copy from the host cannot be.
        self._start = hashed(start_of(seeds, stream, device), torch.full((1,), INPUTS, device=device))

    def at(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates ±1 (seeds, samples, inputs) as int64 and point numbers (seeds, samples) of a step."""
        words = hashed(self._start, step, self._counter)
        signs = 1 - 2 * ((words.unsqueeze(3) >> self._bits) & 1)
        return signs.flatten(2)[:, :, : self._inputs], words[:, :, 0] & self._numbered


@final
class Evaluation:
    """Loss and error per degree of many runs on one fixed sample, the same for every seed and method.

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
        """The loss (runs,) and error (runs, degrees) of functions from (runs, batch, inputs) to (runs, batch)."""
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
                mine = self._owner == seed
                gaps[mine] += residual[mine] @ characters
        errors = (gaps / self._samples).square().view(runs, target.degrees, target.terms).sum(2)
        return losses / self._samples, errors / self._squares
