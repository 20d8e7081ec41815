"""Two optimizers as one: RLS and a fallback that share param groups and state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrls.routing import groups
from torchrls.routing.groups import Factory, Group, clip_factor

Pair = tuple[Group, Group]


class Composite(Optimizer):
    """An optimizer whose param groups come in pairs, one of its own and one of the fallback.

    Both optimizers have the fallback's groups and the state as the same objects. A side of a pair
    may be empty, so that no group appears or vanishes when a parameter changes sides.
    """

    fallback: Optimizer
    _facts: list[Any] | None = None  # the facts from which _known_groups was derived
    _known_groups: dict[Any, Group]  # the last result of _group_of
    _alive: list[Any]  # keeps groups and parameters alive, so that their ids are not reused

    def _compose(
        self, pairs: list[Pair], factory: Factory, defaults: Group, names: dict[Any, str]
    ) -> None:
        """Make the fallback and the param groups of both optimizers."""
        self.fallback = groups.make_fallback(factory, pairs[0][1])
        for _, others in pairs:
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

        ``made`` are the fallback's groups, if it was made with them; else a group is added to it.
        """
        ours, others = pair
        number = len({group["pair"] for group in self.param_groups})
        for parameter in (*ours["params"], *others["params"]):
            if parameter not in self._names:  # it is not in the model
                count = sum(name.startswith("outside.") for name in self._names.values())
                self._names[parameter] = f"outside.{count}"
        mine, theirs = ([self._names[p] for p in side["params"]] for side in pair)
        suffix = f".{number}" if number else ""
        group = {"name": f"rls{suffix}", **ours, "param_names": mine, "method": "rls"}
        Optimizer.add_param_group(self, {**group, "pair": number})
        norm = others.pop("max_grad_norm", self.defaults["max_grad_norm"])
        if made is None:
            self.fallback.add_param_group({**others, "param_names": theirs})
            made = self.fallback.param_groups[-1:]
        for group in made:
            group["param_names"] = [self._names[parameter] for parameter in group["params"]]
            group.update(method="fallback", pair=number, max_grad_norm=norm)
            group.setdefault("name", f"fallback{suffix}")
            self.param_groups.append(group)

    def _share(self) -> None:
        """Replace the groups and the state of the fallback by those of this optimizer."""
        self.fallback.state = self.state
        self.fallback.param_groups = [
            group for group in self.param_groups if group["method"] == "fallback"
        ]

    def _group_of(self) -> dict[Any, Group]:
        """Return the group of every parameter.

        It is the same dict until a group changes, or dtype, device, shape or requires_grad of a
        parameter.
        """
        facts: list[Any] = []
        for group in self.param_groups:
            facts.append(id(group))
            for p in group["params"]:
                facts += id(p), p.requires_grad, p.dtype, p.device, p.shape
        if facts != self._facts:
            self._known_groups = {p: group for group in self.param_groups for p in group["params"]}
            self._facts, self._alive = facts, [*self.param_groups, *self._known_groups]
        return self._known_groups

    def _put(self, parameter: nn.Parameter, home: Group, method: str) -> None:
        """Move a parameter to the side ``method`` of its pair, and delete its state."""
        if home["method"] == method:
            return
        wanted = (method, home["pair"])
        sibling = next(g for g in self.param_groups if (g["method"], g["pair"]) == wanted)
        index = next(i for i, other in enumerate(home["params"]) if other is parameter)
        for key in ("params", "param_names"):
            sibling[key].append(home[key].pop(index))
        self.state.pop(parameter, None)

    def _step_fallback(self, norm: float | None) -> None:
        """Step the fallback on gradients clipped for ``norm``, and restore ``.grad`` after it."""
        others = self.fallback.param_groups
        if not any(group["params"] for group in others):
            return
        own = [(p, p.grad, g) for g in others for p in g["params"] if p.grad is not None]
        is_adam = isinstance(self.fallback, torch.optim.Adam)  # which refuses sparse gradients
        try:
            for parameter, gradient, group in own:
                factor = clip_factor(group, norm)
                given = gradient if factor == 1 else gradient * factor
                if given.is_sparse and (is_adam or given.sparse_dim() > 1):
                    given = given.to_dense()
                if given.layout == torch.strided and given.stride() != parameter.stride():
                    # fused kernels require the strides of the parameter
                    given = torch.empty_like(parameter, dtype=given.dtype).copy_(given)
                parameter.grad = given
            self.fallback.step()
        finally:
            for parameter, gradient, _ in own:
                parameter.grad = gradient
