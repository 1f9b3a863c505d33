"""Find the lists of residual blocks in other people's models, and learn what their blocks pass to each other."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn

Blocks = nn.ModuleList | nn.Sequential
Key = int | str  # an argument of a block's call, by position or keyword
Flags = tuple[object, ...]
Place = tuple[Flags, int]  # an entry of a block's output: the call flags, and its index after the hidden states


@final
class BlockList:
    """One list of blocks, with what has been learnt about the values that its blocks return and pass on.

    Call flags such as `output_attentions` decide what is returned, so this is kept for each combination of flags.
    """

    def __init__(self, path: str, module: Blocks, beside: Sequence[str] = ()) -> None:
        self.path, self.module = path, module
        # The paths of equally long lists in the same module. Their entries may be parts of the same layers.
        self._beside = beside
        # The last layer and its hidden states; kept until a block is seen to receive its predecessor's output.
        self._returned: tuple[int, Tensor] | None = None
        # The output's type and number of entries: a bare tensor, or a tuple or list that begins with the hidden states.
        self.returns: dict[Flags, tuple[type[Any], int]] = {}
        # For each further entry of the output that is passed on: the argument that receives it in the next block.
        self._passed: dict[Place, Key] = {}
        # Of these, the entries that a block computes itself instead of returning an argument unchanged.
        self._made: set[Place] = set()
        # The entries that the last block computed. If the next block receives one, the model passes it on.
        self._last: dict[Place, Any] = {}
        # The last layer and its arguments, if it ran only as a probe.
        self._probed: tuple[int, Mapping[Key, Any]] | None = None

    def entries(self) -> dict[str, nn.Module]:
        """The blocks by their names in the list; a block that is listed twice has two names."""
        return {name: block for name, block in self.module._modules.items() if block is not None}

    def precede(self, layer: int, x: Tensor) -> None:
        """Record the hidden states `x` that a layer returned, as long as `follow` has to check them."""
        self._returned = (layer, x) if self._beside else None

    def follow(self, layer: int, x: Tensor) -> None:
        """Check that a layer receives its predecessor's output `x`; if not, the entries are only parts of layers."""
        if self._returned is None or self._returned[0] != layer - 1:
            return
        if self._returned[1].data_ptr() != x.data_ptr():  # a detached tensor has the same address
            raise ValueError(
                f"running: the entries of {self.path!r} do not get what the one before returned: they are parts of "
                f"layers, as those of {', '.join(map(repr, self._beside))} may be. Only whole residual layers can be "
                "left out; pass blocks= with a list of those, if the model has one."
            )
        self._beside = ()

    def receive(self, given: Mapping[Key, Any]) -> dict[Key, Any]:
        """Note which arguments of a block come from the block before it; return the arguments to call it with.

        If the block before it ran only as a probe, what that computed is replaced by what a bypassed layer passes on.
        """
        received = dict(given)
        for key, value in given.items():
            for place, extra in self._last.items():
                if value is extra:
                    self._passed[place] = key
                    self._made.add(place)
                    if self._probed is not None:
                        received[key] = self._handed(place, *self._probed)
        self.forget()
        return received

    def learn(self, flags: Flags, given: Mapping[Key, Any], output: Any) -> None:
        """Learn from a block's arguments and output how it returns the hidden states, and what else it returns."""
        first, *rest = (output,) if isinstance(output, Tensor) else output
        self.returns[flags] = (type(output), 1 + len(rest))
        for index, extra in enumerate(rest):
            # Equal numbers and strings may be the same object although nothing was passed on.
            if extra is not None and extra is not first and not isinstance(extra, bool | int | float | str):
                key = next((key for key, value in given.items() if value is extra), None)
                if key is None:
                    self._last[flags, index] = extra
                else:
                    self._passed[flags, index] = key

    def bypass(self, layer: int, x: Tensor, flags: Flags, given: Mapping[Key, Any], probed: Any) -> Any:
        """Return the output of a bypassed layer; `probed` is what its block returned in a probe, None without one."""
        if probed is not None:
            self.learn(flags, given, probed)
            self._probed = layer, given
        kind, length = self.returns[flags]
        if issubclass(kind, Tensor):
            return x
        places = [(flags, index) for index in range(length - 1)]
        # What the probe computed is returned, too: if the next block receives it, the model passes it on.
        passed = [
            self._handed(place, layer, given) if place in self._passed else self._last.get(place) for place in places
        ]
        return kind((x, *passed))

    def _handed(self, place: Place, layer: int, given: Mapping[Key, Any]) -> Any:
        """Return the argument that a bypassed layer passes on; raise ValueError if it is None and blocks compute it."""
        value = given.get(self._passed[place])
        if value is None and place in self._made:
            raise ValueError(
                f"running: layer {layer + 1} cannot be bypassed, since it makes what the other blocks at {self.path!r} "
                "receive besides the hidden states (such as a shared position bias). Keep it in every subnetwork: with "
                f"raptr, name {layer + 1} in the setting fixed."
            )
        return value

    def forget(self) -> None:
        """Release the tensors of the last forward pass."""
        self._last, self._probed, self._returned = {}, None, None


def find_lists(model: nn.Module, blocks: str | Blocks | Sequence[str | Blocks] | None) -> tuple[BlockList, ...]:
    """Return the lists named or passed in `blocks`, or the model's single list of blocks if `blocks` is None.

    Raise ValueError if a list is empty, is not in the model, contains lists or overlaps with another one, or if no
    single list can be chosen.
    """
    modules = model.named_modules(remove_duplicate=False)
    lists = {path: module for path, module in modules if isinstance(module, nn.ModuleList | nn.Sequential)}
    if blocks is None:
        paths = [_largest(_outermost(lists), lists)]
    else:
        choices = [blocks] if isinstance(blocks, str | nn.ModuleList | nn.Sequential) else blocks
        paths = [choice if isinstance(choice, str) else _path(choice, lists) for choice in choices]
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
    return tuple(BlockList(path, lists[path], _beside(path, lists)) for path in paths)


def _beside(path: str, lists: Mapping[str, Blocks]) -> list[str]:
    """The paths of the other lists in the same module that are as long as the one at `path`."""
    parent, length = path.rpartition(".")[0], len(lists[path])
    others = [other for other, blocks in lists.items() if other != path and len(blocks) == length]
    return [other for other in others if path and other and other.rpartition(".")[0] == parent]


def _path(blocks: Blocks, lists: Mapping[str, Blocks]) -> str:
    return next((path for path, module in lists.items() if module is blocks), "(the list given)")


def _uniform(blocks: Blocks) -> bool:
    return len({type(block) for block in blocks}) == 1


def _nested(blocks: Blocks) -> bool:
    return any(isinstance(block, nn.ModuleList | nn.ModuleDict) for block in blocks)


def _outermost(lists: Mapping[str, Blocks]) -> dict[str, Blocks]:
    """The possible block lists that are not inside another one.

    An nn.Sequential is possible only if it has several modules, all of one type.
    """
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
    """The path of the list that is clearly the model's blocks: none is longer or has over half its parameters."""
    sizes = {
        path: (len(blocks), sum(parameter.numel() for parameter in blocks.parameters()))
        for path, blocks in candidates.items()
        if _uniform(blocks)
    }
    for path, (length, numel) in sizes.items():
        rest = [size for other, size in sizes.items() if other != path]
        # A factor of two, so that the user has to choose between an encoder and a decoder of equal depth.
        if numel > 0 and all(length >= other[0] and numel >= 2 * other[1] for other in rest):
            return path
    largest = max(sizes, key=lambda path: sizes[path][1], default="")
    beside = _beside(largest, lists) if sizes else []
    if any(not any(entry.children()) for other in beside for entry in lists[other]):  # bare linear layers or norms
        raise ValueError(
            f"attach: the entries of {', '.join(map(repr, [largest, *beside]))} are parts of the same layers, and only "
            "whole residual layers can be left out; pass blocks= with a list of those, if the model has one"
        )
    single = "no single list of blocks of one type is both the longest and by far the largest"
    raise _refusal(single if candidates else "no list of residual blocks was found", lists)


def _refusal(problem: str, lists: Mapping[str, Blocks]) -> ValueError:
    names = ", ".join(f"{path!r} ({len(blocks)} entries)" for path, blocks in _outermost(lists).items())
    if names:
        return ValueError(f"attach: {problem}; pass blocks= with one of, or a list of several of: {names}")
    return ValueError(
        f"attach: {problem}. The model has no nn.ModuleList of blocks, and no nn.Sequential of several modules of one "
        "type; a method needs the residual blocks in one."
    )
