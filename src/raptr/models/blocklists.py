"""The lists of residual blocks in other people's models: finding them, and what their blocks pass to each other."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn

Blocks = nn.ModuleList | nn.Sequential
# What a block was called with: a position or a keyword.
Key = int | str
Flags = tuple[object, ...]


@final
class BlockList:
    """One list of blocks, and what was learnt of what its blocks return and pass on, by call flags.

    Call flags such as `output_attentions` decide what is returned, so everything is kept for each combination.
    """

    def __init__(self, path: str, module: Blocks) -> None:
        self.path, self.module = path, module
        # How many entries follow the hidden states in what a block returns; None: a bare tensor.
        self.returns: dict[Flags, int | None] = {}
        # The argument that carries on what a block returned in a place behind the hidden states.
        self._passed: dict[tuple[Flags, int], Key] = {}
        # Those of them that a block computes when it is given None.
        self._computed: set[tuple[Flags, int]] = set()
        # What the last block returned behind the hidden states, to notice a model that passes it on.
        self._last: dict[tuple[Flags, int], Tensor] = {}
        # The layer that was run only to learn what it returns, when the last call did so.
        self._probed: int | None = None

    def entries(self) -> dict[str, nn.Module]:
        """The blocks by their names in the list; a block that stands there twice has two."""
        return {name: block for name, block in self.module._modules.items() if block is not None}

    def receive(self, given: Mapping[Key, Any]) -> None:
        """Before each block: see whether it is given what the one before returned."""
        for key, value in given.items():
            for place, extra in self._last.items():
                if value is extra:
                    self._passed[place] = key
                    self._computed.add(place)
        last, self._last, probed, self._probed = self._last, {}, self._probed, None
        if probed is not None and any(value is extra for value in given.values() for extra in last.values()):
            raise self._needed(probed)

    def learn(self, flags: Flags, given: Mapping[Key, Any], output: Any, probed: int | None = None) -> None:
        """After a block: what it returned. `probed` is the number of a layer that is bypassed all the same."""
        first, *rest = output if isinstance(output, tuple) else (output,)
        self.returns[flags] = len(rest) if isinstance(output, tuple) else None
        self._probed = probed
        for index, extra in enumerate(rest):
            if isinstance(extra, Tensor) and extra is not first:
                key = next((key for key, value in given.items() if value is extra), None)
                if key is None:
                    self._last[flags, index] = extra
                else:
                    self._passed[flags, index] = key

    def bypass(self, flags: Flags, given: Mapping[Key, Any], x: Tensor, layer: int) -> Any:
        """What a block returns that passes on what it was given."""
        extras = self.returns[flags]
        if extras is None:
            return x
        rest: list[Any] = [None] * extras
        for index in range(extras):
            place = (flags, index)
            if place in self._last and self._probed is not None:
                rest[index] = self._last[place]
            elif place in self._passed:
                rest[index] = given.get(self._passed[place])
                if rest[index] is None and place in self._computed:
                    raise self._needed(layer)
        return (x, *rest)

    def forget(self) -> None:
        """Let go of the tensors of a forward pass."""
        self._last, self._probed = {}, None

    def _needed(self, layer: int) -> ValueError:
        return ValueError(
            f"running: layer {layer + 1} cannot be bypassed, since it computes what the other blocks at {self.path!r} "
            "receive beside the hidden states (such as a shared position bias). Keep it in every subnetwork: with "
            f"raptr, name {layer + 1} in the setting fixed."
        )


def find_lists(model: nn.Module, blocks: str | Blocks | Sequence[str | Blocks] | None) -> tuple[BlockList, ...]:
    """The model's one list of blocks, or those that are named or given."""
    modules = model.named_modules(remove_duplicate=False)
    lists = {path: module for path, module in modules if isinstance(module, nn.ModuleList | nn.Sequential)}
    if blocks is None:
        paths = [_largest(_outermost(lists), lists)]
    else:
        several = [blocks] if isinstance(blocks, str | nn.ModuleList | nn.Sequential) else blocks
        paths = [one if isinstance(one, str) else _path(one, lists) for one in several]
    for place, path in enumerate(paths):
        if path not in lists or len(lists[path]) == 0:
            kinds = "nn.ModuleList or nn.Sequential"
            raise _refusal(f"blocks is {path!r}, which is not a filled {kinds} of the model", lists)
        if _nested(lists[path]):
            raise _refusal(f"blocks is {path!r}, whose entries are lists, not blocks", lists)
        if any(f"{path}.".startswith(f"{other}.") or other.startswith(f"{path}.") for other in paths[:place]):
            raise _refusal(f"blocks names {path!r} and another list with the same blocks", lists)
    if not paths:
        raise _refusal("blocks is an empty list", lists)
    return tuple(BlockList(path, lists[path]) for path in paths)


def _path(blocks: Blocks, lists: Mapping[str, Blocks]) -> str:
    return next((path for path, module in lists.items() if module is blocks), "(the list given)")


def _uniform(blocks: Blocks) -> bool:
    return len({type(block) for block in blocks}) == 1


def _nested(blocks: Blocks) -> bool:
    return any(isinstance(block, nn.ModuleList | nn.ModuleDict) for block in blocks)


def _outermost(lists: Mapping[str, Blocks]) -> dict[str, Blocks]:
    """The lists that are not inside an entry of another one; a sequence of unlike modules is no list of blocks."""
    likely = {
        path: blocks
        for path, blocks in lists.items()
        if not _nested(blocks) and (isinstance(blocks, nn.ModuleList) or (len(blocks) > 1 and _uniform(blocks)))
    }
    return {
        path: blocks
        for path, blocks in likely.items()
        if not any(path != other and path.startswith(f"{other}." if other else "") for other in likely)
    }


def _largest(candidates: Mapping[str, Blocks], lists: Mapping[str, Blocks]) -> str:
    """The path of the one list that is plainly the model's blocks."""
    sizes = {
        path: (len(blocks), sum(parameter.numel() for parameter in blocks.parameters()))
        for path, blocks in candidates.items()
        if _uniform(blocks)
    }
    for path, (length, numel) in sizes.items():
        rest = [size for other, size in sizes.items() if other != path]
        # Twice, so that an encoder and a decoder of equal depth stay a question for the user.
        if numel > 0 and all(length >= other[0] and numel >= 2 * other[1] for other in rest):
            return path
    raise _refusal("no single list of blocks of one type is both the longest and by far the largest", lists)


def _refusal(problem: str, lists: Mapping[str, Blocks]) -> ValueError:
    found = ", ".join(f"{path!r} ({len(blocks)} entries)" for path, blocks in _outermost(lists).items())
    return ValueError(
        f"attach: {problem}; pass blocks= with one of, or a list of several of: {found or 'none found in this model'}"
    )
