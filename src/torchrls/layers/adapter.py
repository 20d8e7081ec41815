"""Adapters: where the augmented matrices Theta of a layer type are, and what their rows are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from torchrls.layers.layer import Block


class Adapter:
    """The description of a layer type for RLS. Subclass and :func:`register` it for your own.

    The layer must be linear in its parameters: outputs = rows @ Theta. An adapter says where Theta
    is (:attr:`block`) and what the rows of a call are (:meth:`rows`).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchrls import RLS, Adapter, Block, register
        >>> class Doubled(nn.Module):
        ...     def __init__(self, n, m):
        ...         super().__init__()
        ...         self.kernel = nn.Parameter(torch.randn(n, m) / n**0.5)
        ...     def forward(self, x):
        ...         return (2 * x) @ self.kernel
        >>> @register(Doubled)
        ... class DoubledAdapter(Adapter):
        ...     block = Block("kernel", bias=None, inputs_first=True)
        ...     def rows(self, module, x):
        ...         return 2 * x
        >>> [layer.name for layer in RLS(nn.Sequential(Doubled(4, 3))).layers]
        ['0']
    """

    #: The place of Theta in modules with one matrix; others override :meth:`blocks`.
    block: Block = Block()
    #: Whether the hook may return the output tensor itself, which the layer's own backward must
    #: then not need. False is always safe, and costs one copy of the output.
    in_place: bool = False
    #: Whether the output is exactly rows @ weight.T plus the bias, of a single block.
    is_affine: bool = False

    def blocks(self, module: Any) -> list[Block]:
        """Return the matrices of this module that RLS trains."""
        return [self.block]

    def rows(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the rows of a call of the module's forward with these arguments.

        Returns:
            A tensor (..., inputs) or :class:`Rows`; for several blocks, a list with one for each,
            and None for a block that was not used. Do not detach it: rows to which no gradient
            flows are taken for inputs of the network, which the default step scales.
        """
        raise NotImplementedError(f"{type(self).__name__} has to say what its rows are")

    def silent(self, module: Any) -> list[nn.Module]:
        """Return the submodules whose parameters are used without the submodule being called."""
        return []


class KernelAdapter(Adapter):
    """The adapter of layers with several matrices inside of one kernel call, as ``nn.LSTM`` has."""

    #: The torch functions that the module's forward calls with its weights.
    functions: frozenset[Any] = frozenset()

    def run(self, module: Any, function: Any, args: tuple[Any, ...], watch: Any) -> Any:
        """Return ``function(*args)``, after ``watch.attach`` has tied the rows to the output.

        ``watch.attach(output, [(weight, rows), ...])`` returns the output with a backward that
        commits the rows of each weight.
        """
        raise NotImplementedError(f"{type(self).__name__} has to say how its kernel is run")


AdapterType = TypeVar("AdapterType", bound=type[Adapter])
_ADAPTERS: dict[type[nn.Module] | str, Adapter] = {}


def register(*kinds: type[nn.Module] | str) -> Callable[[AdapterType], AdapterType]:
    """Register the decorated adapter for the given module types and their subclasses.

    A type can be given by its full name, so that its package need not be imported. The last
    registration of a type wins, and the most specific type of a module decides.
    """
    for kind in kinds:
        if not (isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, nn.Module))):
            raise TypeError(f"register takes module types or their full names, got {kind!r}")

    def decorate(adapter: AdapterType) -> AdapterType:
        if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
            raise TypeError(f"register decorates a subclass of Adapter, got {adapter!r}")
        _ADAPTERS.update(dict.fromkeys(kinds, adapter()))
        return adapter

    return decorate


def unregister(*kinds: type[nn.Module] | str) -> None:
    """Remove the adapters of these types; existing optimizers are not changed."""
    for kind in kinds:
        _ADAPTERS.pop(kind, None)


def adapter_for(module: nn.Module) -> tuple[Adapter, type[nn.Module]] | None:
    """Return the adapter of a module and the type that it is registered for; None without one."""
    for kind in type(module).__mro__:
        adapter = _ADAPTERS.get(kind) or _ADAPTERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if adapter is not None:
            return adapter, kind
    return None


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], index: int, name: str) -> Any:
    """Return an argument of a forward call: by position, by name, or by order if it was renamed."""
    if len(args) > index:
        return args[index]
    return kwargs[name] if name in kwargs else list(kwargs.values())[index - len(args)]
