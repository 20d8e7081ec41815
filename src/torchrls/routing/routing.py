"""Routing: every parameter is trained by exactly one rule, RLS or the fallback."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from torchrls.common import shards
from torchrls.layers.adapter import adapter_for
from torchrls.layers.layer import Block, Layer
from torchrls.routing.groups import check_trainable

#: The modules whose parameters are no matrices, whatever their shape.
NO_MATRICES = (
    *(nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
)
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


class Routing:
    """The layers of a model that RLS can train, and why the other parameters are not among them.

    Attributes:
        layers: one per weight; those whose rows no adapter knows, which have no P, come last.
        reasons: why no adapter covers a parameter, for each one outside of layers with rows.
        names: the name of each parameter.
        weights_of_biases: for each bias that can be a row of Theta, the weights beside it.
    """

    def __init__(self, model: nn.Module, exclude: Iterable[Any] = (), *, strict: bool = True):
        self.names = parameter_names(model)
        self.layers: list[Layer] = []
        self.reasons: dict[nn.Parameter, str] = {}
        self.weights_of_biases: dict[nn.Parameter, list[nn.Parameter]] = {}
        self._module_names = {module: clean(name) for name, module in model.named_modules()}
        self._excluded = excluded_modules(model, exclude, strict)
        self._owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in self._module_names:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._owners[parameter].append((module, name))
        self._blocks: dict[nn.Module, list[Block]] = {}  # of modules with an adapter
        self._find_layers()
        trained = {p for layer in self.layers for p in (layer.weight, layer.bias)}
        for parameter, ((module, name), *_) in self._owners.items():
            if parameter not in trained and parameter not in self.reasons:
                self.reasons[parameter] = self._why(module, name)
                if module not in self._excluded and not isinstance(module, NO_MATRICES):
                    self._find_matrix(parameter, module, name)

    def capable(self, given: set[Any], step: str) -> set[Any]:
        """Return those of the given parameters that this kind of step has a rule for."""
        return given & (self._weights(step) | self.weights_of_biases.keys())

    def trained(self, given: set[Any], step: str) -> set[Any]:
        """Return those of the given parameters that RLS trains: a bias only beside its weights."""
        biases = {b for b, weights in self.weights_of_biases.items() if joins(weights, given)}
        return given & (self._weights(step) | biases)

    def _weights(self, step: str) -> set[Any]:
        """Return the weights that a kind of step trains: in the paper's, those with rows."""
        return {x.weight for x in self.layers if x.has_rows or step == "adaptive"}

    def _find_layers(self) -> None:
        """Make a layer of each weight that all of its modules use in the same way."""
        for weight, uses in self._uses().items():
            modules, block = [module for module, _, _ in uses], uses[0][2]
            if not shards.is_put_together(weight, self._module_names):
                self.reasons[weight] = "spread by tensor parallelism: no rank sees its rows"
                continue
            if len(uses) != len(self._owners[weight]) or any(use[2] != block for use in uses):
                names = " and ".join(self._describe(owner) for owner, _ in self._owners[weight])
                self.reasons[weight] = f"shared by {names}, not all trained by one rule"
                continue
            biases = {module._parameters.get(block.bias or "") for module in modules}
            bias = biases.pop() if len(biases) == 1 else None
            if bias is not None and {owner for owner, _ in self._owners[bias]} != {*modules}:
                bias = None
            alone = len(self._blocks[modules[0]]) == 1
            part = "" if alone else block.weight.removesuffix("_weight")
            name = ".".join(filter(None, (self._module_names[modules[0]], part)))
            name = name or type(modules[0]).__name__
            users = [(module, index) for module, index, _ in uses]
            self.layers.append(Layer(name, block, weight, bias, users))
            if bias is not None:
                self.weights_of_biases.setdefault(bias, []).append(weight)

    def _uses(self) -> dict[nn.Parameter, list[tuple[nn.Module, int, Block]]]:
        """Return the uses of each weight: (module, index of the block in it, block).

        Modules that are excluded, or ``silent`` in another module's adapter, are left out.
        """
        known = self._module_names
        adapters = {x: match[0] for x in known if (match := adapter_for(x)) is not None}
        silent = {inner for module, adapter in adapters.items() for inner in adapter.silent(module)}
        uses: dict[nn.Parameter, list[tuple[nn.Module, int, Block]]] = defaultdict(list)
        for module, adapter in adapters.items():
            if module in self._excluded:
                continue
            blocks = self._blocks[module] = adapter.blocks(module)
            if module in silent:
                continue
            kind = type(adapter).__name__
            if not isinstance(blocks, (list, tuple)):
                raise TypeError(
                    f"{kind}.blocks must return a list of Block, got {type(blocks).__name__}"
                )
            for index, block in enumerate(blocks):
                weight = module._parameters.get(block.weight)
                if weight is None and not hasattr(module, block.weight):
                    raise ValueError(
                        f"{kind} names the weight {block.weight!r}, which "
                        f"{self._describe(module)} does not have"
                    )
                if block.bias not in (None, "bias") and not hasattr(module, block.bias):
                    raise ValueError(
                        f"{kind} names the bias {block.bias!r}, which "
                        f"{self._describe(module)} does not have; say bias=None if it has none"
                    )
                if weight is not None:
                    uses[weight].append((module, index, block))
        return uses

    def _find_matrix(self, parameter: nn.Parameter, module: nn.Module, name: str) -> None:
        """Make a layer without rows of a matrix that no adapter covers: experts, say.

        A weight of three dimensions is several matrices, unless its module has a ``kernel_size``.
        """
        path = ".".join(filter(None, (self._module_names[module], name)))
        user = f".{path}".partition(".parametrizations.")[0][1:]  # torch.nn.utils.parametrize
        modules = {known: module for module, known in self._module_names.items()}
        shape, groups = parameter.shape, 1
        if hasattr(modules.get(user, module), "kernel_size"):
            inputs = parameter[0].numel()
        elif len(shape) == 3 and min(shape) > 1:
            groups, _, inputs = shape
        else:
            outputs = next((size for size in shape if size > 1), 1)
            inputs = parameter.numel() // outputs
        if min(parameter.numel() // max(inputs, 1), inputs) > 1:
            block = Block(name, None, inputs=inputs, groups=groups)
            self.layers.append(Layer(path, block, parameter, None))

    def _why(self, module: nn.Module, name: str) -> str:
        """Return why RLS does not train the parameter ``name`` of a module."""
        if module in self._excluded:
            return "excluded"
        if module not in self._blocks:
            return f"no rule for {type(module).__name__}"
        if any(name in (block.weight, block.bias) for block in self._blocks[module]):
            return "its rows cannot be observed" if name != "bias" else "bias without its weight"
        return f"no row of {type(module).__name__}"

    def _describe(self, module: nn.Module) -> str:
        return f"{type(module).__name__} {self._module_names[module] or '(the model)'!r}"


def joins(weights: list[nn.Parameter], given: Container[Any]) -> bool:
    """Return whether a bias with these weights is a row of Theta: all are given and trained."""
    return all(weight in given and weight.requires_grad for weight in weights)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's module inside of DataParallel, DistributedDataParallel or torch.compile."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def clean(name: str) -> str:
    """Return a name without the parts that compile and checkpoint wrappers put in."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "").removesuffix(wrapper[:-1]).removesuffix(".")
    return name


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the first name of every parameter; raise if there is one that RLS cannot train."""
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


def listed(exclude: Any) -> tuple[Any, ...]:
    """Return ``exclude`` as a tuple; a single item need not be in a list."""
    if isinstance(exclude, (str, type, nn.Module)):
        return (exclude,)
    if not isinstance(exclude, Iterable):
        raise TypeError(f"exclude takes modules, module types or name patterns, got {exclude!r}")
    return tuple(exclude)


def excluded_modules(model: nn.Module, exclude: Iterable[Any], strict: bool) -> set[nn.Module]:
    """Return the modules that ``exclude`` names, with all modules inside of them.

    With ``strict``, raise if a pattern or module matches nothing in the model.
    """
    names = {clean(name): module for name, module in model.named_modules(remove_duplicate=False)}
    roots: list[nn.Module] = []
    for item in exclude:
        if isinstance(item, str):
            matches = [module for name, module in names.items() if name and fnmatchcase(name, item)]
            if strict and not matches:
                known = ", ".join(repr(name) for name in list(names)[1:9])
                raise ValueError(
                    f"exclude pattern {item!r} matches no module; patterns are for module names, "
                    f"not parameter names, and the model has {known or 'no submodules'}"
                    + (", ..." if len(names) > 9 else "")
                )
        elif isinstance(item, type) and issubclass(item, nn.Module):
            matches = [module for module in model.modules() if isinstance(module, item)]
        elif isinstance(item, nn.Module):
            matches = [module for module in model.modules() if module is item]
            if strict and not matches:
                raise ValueError(f"exclude has a {type(item).__name__} that is not in the model")
        else:
            raise TypeError(
                f"exclude takes modules, module types or name patterns, got {item!r} "
                f"of type {type(item).__name__}"
            )
        roots += matches
    return {inner for root in roots for inner in root.modules()}
