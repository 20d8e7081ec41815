"""Which parameter is trained by what: every one by exactly one rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchrls.common import shards
from torchrls.layers.adapter import Block, adapter_for
from torchrls.layers.layer import Layer

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


class Use(NamedTuple):
    """A parameter in the role of a block's weight."""

    module: nn.Module
    position: int
    block: Block


class Routing:
    """The layers of a model that RLS trains, and why the other parameters are not among them.

    Attributes:
        layers: one per augmented matrix.
        reasons: for every parameter outside of the layers, why the fallback trains it.
        names: every parameter's name.
    """

    def __init__(self, model: nn.Module, exclude: Any = (), *, strict: bool = True) -> None:
        self.names = parameter_names(model)
        self.layers: list[Layer] = []
        self.reasons: dict[nn.Parameter, str] = {}
        self._module_names = {module: clean(name) for name, module in model.named_modules()}
        self._excluded = excluded_modules(model, exclude, strict)
        self._owners = owners(model)
        self._find_layers()
        self._explain()

    def capable(self, given: set[Any]) -> set[Any]:
        """Which of the given parameters RLS has a rule for."""
        return given & ({layer.weight for layer in self.layers} | self.weights_of_biases.keys())

    def trained(self, given: set[Any]) -> set[Any]:
        """Which of them it trains as things are now: some biases depend on their weights."""
        biases = {b for b, weights in self.weights_of_biases.items() if joins(weights, given)}
        return given & ({layer.weight for layer in self.layers} | biases)

    @property
    def weights_of_biases(self) -> dict[nn.Parameter, list[nn.Parameter]]:
        """For every bias that can be a row of Theta, the weights that it goes with."""
        found: dict[nn.Parameter, list[nn.Parameter]] = defaultdict(list)
        for layer in self.layers:
            if layer.bias is not None:
                found[layer.bias].append(layer.weight)
        return dict(found)

    def _find_layers(self) -> None:
        uses = self._uses()
        for weight, found in uses.items():
            blocks = {use.block for use in found}
            if not shards.is_put_together(weight, self._module_names):
                self.reasons[weight] = "spread by tensor parallelism: no rank sees its rows"
            elif len(found) == len(self._owners[weight]) and len(blocks) == 1:
                self.layers.append(self._layer(weight, found))
            else:
                self.reasons[weight] = self._why_shared(weight)

    def _uses(self) -> dict[nn.Parameter, list[Use]]:
        """The weights of all modules with an adapter that are neither excluded nor silent."""
        silent = {child for module in self._module_names for child in _silent(module)}
        uses: dict[nn.Parameter, list[Use]] = defaultdict(list)
        for module in self._module_names:
            match = adapter_for(module)
            if match is None or module in self._excluded or module in silent:
                continue
            blocks = match[0].blocks(module)
            if not isinstance(blocks, (list, tuple)):
                raise TypeError(
                    f"{type(match[0]).__name__}.blocks must return a list of Block, got "
                    f"{type(blocks).__name__}"
                )
            for index, block in enumerate(blocks):
                weight = module._parameters.get(block.weight)
                if weight is None and not hasattr(module, block.weight):
                    raise ValueError(
                        f"{type(match[0]).__name__} names the weight {block.weight!r}, which "
                        f"{self._describe(module)} does not have"
                    )
                self._check_bias(match[0], module, block)
                if weight is not None:
                    uses[weight].append(Use(module, index, block))
        return uses

    def _check_bias(self, adapter: Any, module: nn.Module, block: Block) -> None:
        """A layer need not have the one that is usual."""
        if block.bias not in (None, "bias") and not hasattr(module, block.bias):
            raise ValueError(
                f"{type(adapter).__name__} names the bias {block.bias!r}, which "
                f"{self._describe(module)} does not have; say bias=None if it has none"
            )

    def _layer(self, weight: nn.Parameter, uses: list[Use]) -> Layer:
        modules = [use.module for use in uses]
        block = uses[0].block
        biases = {module._parameters.get(block.bias or "") for module in modules}
        bias = biases.pop() if len(biases) == 1 else None
        if bias is not None and {owner for owner, _ in self._owners[bias]} != set(modules):
            bias = None
        name = self._layer_name(modules[0], block)
        return Layer(name, block, weight, bias, [(use.module, use.position) for use in uses])

    def _layer_name(self, module: nn.Module, block: Block) -> str:
        match = adapter_for(module)
        alone = match is not None and len(match[0].blocks(module)) == 1
        part = "" if alone else block.weight.removesuffix("_weight")
        path = ".".join(filter(None, (self._module_names[module], part)))
        return path or type(module).__name__

    def _why_shared(self, weight: nn.Parameter) -> str:
        names = [self._describe(module) for module, _ in self._owners[weight]]
        return f"shared by {' and '.join(names)}, not all trained by one rule"

    def _describe(self, module: nn.Module) -> str:
        return f"{type(module).__name__} {self._module_names[module] or '(the model)'!r}"

    def _explain(self) -> None:
        trained = {p for layer in self.layers for p in (layer.weight, layer.bias)}
        for parameter, found in self._owners.items():
            if parameter not in trained:
                module, name = found[0]
                self.reasons.setdefault(parameter, self._why(module, name))

    def _why(self, module: nn.Module, name: str) -> str:
        if module in self._excluded:
            return "excluded"
        match = adapter_for(module)
        if match is None:
            return f"no rule for {type(module).__name__}"
        names = {part for block in match[0].blocks(module) for part in (block.weight, block.bias)}
        if name in names:
            return "its rows cannot be observed" if name != "bias" else "bias without its weight"
        return f"no row of {type(module).__name__}"


def joins(weights: list[nn.Parameter], given: Container[Any]) -> bool:
    """Whether a bias is a row of Theta: all of its weights are given and trained."""
    return all(weight in given and weight.requires_grad for weight in weights)


def _silent(module: nn.Module) -> list[nn.Module]:
    match = adapter_for(module)
    return match[0].silent(module) if match is not None else []


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside of DataParallel, DistributedDataParallel or compile."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, parallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def clean(name: str) -> str:
    """A name without the parts that compile and checkpoint wrappers put in."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "").removesuffix(wrapper[:-1]).removesuffix(".")
    return name


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Every parameter once, with its first name; what RLS cannot train is an error."""
    names = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} is not initialized: run the model once, so that its lazy "
                f"modules know their shapes, before making the optimizer"
            )
        check_trainable(parameter, name)
        names[parameter] = clean(name)
    if not names:
        raise ValueError(f"the model has no parameters: got {type(model).__name__}")
    return names


def check_trainable(parameter: Any, name: str) -> None:
    """Raise for parameters that no rule here can train."""
    if parameter.is_complex():
        raise ValueError(
            f"parameter {name!r} is complex ({parameter.dtype}); RLS trains real parameters: "
            f"store its real and imaginary parts"
        )
    if parameter.layout != torch.strided:
        raise ValueError(
            f"parameter {name!r} has layout {parameter.layout}; RLS trains dense parameters"
        )


def owners(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The modules that hold each parameter, and what they call it."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found[parameter].append((module, name))
    return dict(found)


def listed(exclude: Any) -> tuple[Any, ...]:
    """``exclude`` as a tuple; a single item need not be in a list."""
    if isinstance(exclude, (str, type, nn.Module)):
        return (exclude,)
    if not isinstance(exclude, Iterable):
        raise TypeError(f"exclude takes modules, module types or name patterns, got {exclude!r}")
    return tuple(exclude)


def excluded_modules(model: nn.Module, exclude: Any, strict: bool = True) -> set[nn.Module]:
    """The modules that ``exclude`` names, with everything inside of them.

    With ``strict``, an item that matches nothing is an error.
    """
    roots = [root for item in listed(exclude) for root in _matches(model, item, strict)]
    return {inner for root in roots for inner in root.modules()}


def _matches(model: nn.Module, item: Any, strict: bool) -> list[nn.Module]:
    if isinstance(item, str):
        return _matching_names(model, item, strict)
    if isinstance(item, type) and issubclass(item, nn.Module):
        return [module for module in model.modules() if isinstance(module, item)]
    if isinstance(item, nn.Module):
        inside = any(module is item for module in model.modules())
        if strict and not inside:
            raise ValueError(f"exclude has a {type(item).__name__} that is not in the model")
        return [item] if inside else []
    raise TypeError(
        f"exclude takes modules, module types or name patterns, got {item!r} "
        f"of type {type(item).__name__}"
    )


def _matching_names(model: nn.Module, pattern: str, strict: bool) -> list[nn.Module]:
    modules = {clean(name): module for name, module in model.named_modules(remove_duplicate=False)}
    found = [module for name, module in modules.items() if name and fnmatchcase(name, pattern)]
    if strict and not found:
        known = ", ".join(repr(name) for name in list(modules)[1:9])
        raise ValueError(
            f"exclude pattern {pattern!r} matches no module; patterns are for module names, "
            f"not parameter names, and the model has {known or 'no submodules'}"
            + (", ..." if len(modules) > 9 else "")
        )
    return found
