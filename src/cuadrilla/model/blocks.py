"""The blocks of any model, and gradient checkpointing over them.

A task may name its blocks (`TaskDefaults.blocks`). Otherwise the blocks are the members of each outermost ModuleList or
Sequential whose members all have one class and submodules: the layers of a transformer, the stages of a ResNet.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cuadrilla.errors import TaskError


def blocks_of(model: nn.Module, *, named: Sequence[str] = ()) -> list[nn.Module]:
    """All blocks, each once. `named` are names of modules; a ModuleList among them stands for its members.

    Raises TaskError for a name that the model does not have, and if no block is found.
    """
    modules = dict(model.named_modules())
    if missing := [name for name in named if name not in modules]:
        raise TaskError(
            "the model has no module {name}, which TaskDefaults(blocks=...) names",
            name=missing[0],
            hint="its parts are called {names}",
            names=", ".join(name for name, _ in model.named_children()) or "-",
        )
    parts = [modules[name] for name in named]
    found = [block for part in parts for block in (part if isinstance(part, nn.ModuleList) else [part])]
    found = found if named else list(_alike(model))
    if not found:
        raise TaskError(
            "the model has no list of alike blocks, which model.gradient_checkpointing needs",
            hint='name them in the task: TaskDefaults(blocks=("encoder.layers",)); or leave that setting off',
        )
    return list(dict.fromkeys(found))


def recompute(blocks: Sequence[nn.Module]) -> None:
    """Make the backward pass compute each block's activations again, from the block's input and with the same random
    numbers. Results and parameter names do not change. A copy of the model recomputes its own blocks."""
    for block in blocks:
        setattr(block, "forward", partial(_recomputed, block.forward))  # noqa: B010  a method, as far as mypy knows


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _alike(module: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost ModuleLists and Sequentials whose members are alike."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        members = list(module)
        if len({type(member) for member in members}) == 1 and all(any(member.children()) for member in members):
            yield from members
            return
    for child in module.children():
        yield from _alike(child)
