"""CUDA graphs without a card: what a piece of work did, operator by operator, is done again.

As with a graph, Python does not run again, nor any decision in it: only the operators do, on the
tensors that they had. Results of earlier ones are computed anew; all others are what is in them.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from engine.cuda.capture import Work


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))  # alive, so that ids stay theirs
        return out


def record(work: Work) -> Work:
    """A `Capture`."""
    recorder = _Recorder()
    with recorder:
        work()

    def replay() -> None:
        values: dict[int, torch.Tensor] = {}

        def value(tensor: torch.Tensor) -> torch.Tensor:
            return values.get(id(tensor), tensor)

        for func, args, kwargs, out in recorder.calls:
            args, kwargs = tree_map_only(torch.Tensor, value, (args, kwargs))
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor):
                    values[id(old)] = new

    return replay
