"""Two optimizers as one: RLS and a fallback that share param groups and state."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchrls.routing import groups
from torchrls.routing.groups import Factory, Group, clip_factor
from torchrls.routing.membership import Membership

Pair = tuple[Group, Group]


class Composite(Optimizer):
    """An optimizer whose param groups come in pairs, one of its own and one of the fallback.

    The fallback's groups are the same objects in both optimizers, and so is the state. A pair
    may have an empty side, so that its groups stay where they are when a parameter changes sides.
    """

    fallback: Optimizer

    def _compose(
        self, pairs: list[Pair], factory: Factory, defaults: Group, names: dict[Any, str]
    ) -> None:
        """Make the fallback, and the groups of both."""
        self.fallback = groups.make_fallback(factory, pairs[0][1])
        for _, others in pairs[1:]:
            groups.check_fallback_options(others, self.fallback)
        made = self.fallback.param_groups
        super().__init__([{"params": []}], defaults)
        self.param_groups.clear()
        self._names = names
        self._append_pair(pairs[0], made)
        for pair in pairs[1:]:
            self._append_pair(pair)
        self._share()

    def _append_pair(self, pair: Pair, made: list[Group] | None = None) -> None:
        """Append a group for RLS and its sibling for the fallback.

        ``made`` are the fallback's groups if it has been made with them; else it is given one.
        """
        ours, others = pair
        number = len({group["pair"] for group in self.param_groups})
        groups.name_outsiders([*ours["params"], *others["params"]], self._names)
        names = [self._names[parameter] for parameter in ours["params"]]
        group = {**ours, "param_names": names, "method": "rls", "pair": number}
        Optimizer.add_param_group(self, group)
        norm = others.pop("max_grad_norm", self.defaults["max_grad_norm"])
        if made is None:
            named = {"param_names": [self._names[parameter] for parameter in others["params"]]}
            self.fallback.add_param_group({**others, **named})
            made = self.fallback.param_groups[-1:]
        for group in made:
            group["param_names"] = [self._names[parameter] for parameter in group["params"]]
            group.update(method="fallback", pair=number, max_grad_norm=norm)
            self.param_groups.append(group)

    def _share(self) -> None:
        """The fallback works on the same groups and the same state as we do."""
        self.fallback.state = self.state
        self.fallback.param_groups = [
            group for group in self.param_groups if group["method"] == "fallback"
        ]

    @cached_property
    def _membership(self) -> Membership:
        return Membership()

    def _group_of(self) -> dict[Any, Group]:
        """The group of every parameter; the same dict as long as nothing about that changes."""
        return self._membership.of(self.param_groups)

    def _put(self, parameter: nn.Parameter, home: Group, method: str) -> Group:
        """See to it that a parameter is on this side of its pair; state does not change sides."""
        if home["method"] == method:
            return home
        wanted = (method, home["pair"])
        sibling = next(g for g in self.param_groups if (g["method"], g["pair"]) == wanted)
        groups.move(parameter, home, sibling)
        self.state.pop(parameter, None)
        return sibling

    def _step_fallback(self, norm: float | None) -> None:
        """A step of the fallback on clipped gradients; ``.grad`` is then what it was."""
        others = self.fallback.param_groups
        for group in others:
            if group["params"]:
                break
        else:
            return
        own = [(p, p.grad, g) for g in others for p in g["params"] if p.grad is not None]
        try:
            for parameter, gradient, group in own:
                given = gradient if norm is None else gradient * clip_factor(group, norm)
                parameter.grad = in_the_layout_of(parameter, given)
            self.fallback.step()
        finally:
            for parameter, gradient, _ in own:
                parameter.grad = gradient


def in_the_layout_of(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """The gradient with the strides of its parameter: fused kernels do not look at them."""
    if gradient.layout != torch.strided or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
