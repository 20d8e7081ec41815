"""The optimizer: routes parameters, keeps state and applies the update."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from torchrls import checkpoint, groups, report
from torchrls.capture import Capture
from torchrls.groups import Factory, Group
from torchrls.hyperparameters import PAPER, check
from torchrls.layers import Layer, masked_rows
from torchrls.routing import Routing, listed, unwrapped
from torchrls.update import Update, clip_factor, is_sound


class RLSWarning(UserWarning):
    """Training can go on, but something is not as it should be."""


class RLS(Optimizer):
    r"""Recursive least squares for deep networks, after Zhang et al.

    Every layer :math:`l` keeps the inverse autocorrelation matrix :math:`P` of its inputs, and
    uses it as the learning rate of its gradient :math:`G` (equations (51)-(55), (63), (98)-(100)):

    .. math::
        u &= P \bar x, \qquad h = \lambda + c\, \bar x^T u \\
        \Omega &\leftarrow \alpha \Omega - (\eta / h)\, P G \\
        P &\leftarrow (P - (c / h)\, u u^T) / \lambda \\
        \Theta &\leftarrow \Theta + \Omega - \gamma P\, \mathrm{sgn}(\Theta)

    where :math:`\bar x` is the mean input of the minibatch with a 1 for the bias, and
    :math:`c = k`, or :math:`c = k T` for layers that see T time steps a sample.

    Args:
        model: the network. Every parameter is taken care of.
        params: param groups with hyperparameters of their own; all parameters if None.
        lr: :math:`\eta`, the gradient scaling factor; what schedulers drive.
        forgetting: :math:`\lambda` in (0, 1].
        ratio: :math:`k`, the average-approximation ratio factor.
        momentum: :math:`\alpha` in [0, 1).
        l1: :math:`\gamma`, the L1 regularization factor.
        initial_inverse: :math:`P_0 = \delta I`, this is :math:`\delta`.
        time_scaling: :math:`c = k T` for layers with time; False for losses that average
            over time.
        max_grad_norm: scale the gradients as ``clip_grad_norm_(model.parameters())`` would,
            without changing ``.grad``.
        exclude: modules, module types or glob patterns of module names to leave to the
            fallback. The paper's hybrid mode (HRLS) is ``exclude=[model.head]``.
        fallback: makes the optimizer of what RLS has no rule for, from a list of param groups;
            ``torch.optim.Adam`` at its defaults if None.

    Example:
        >>> import torch
        >>> from torchrls import RLS, LeastSquaresLoss
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 1)
        >>> x = torch.randn(64, 3); y = x.sum(1, keepdim=True)
        >>> optimizer, loss_fn = RLS(model), LeastSquaresLoss()
        >>> for _ in range(30):
        ...     optimizer.zero_grad()
        ...     loss = loss_fn(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        >>> loss.item() < 1e-6
        True

    Reference:
        C. Zhang, Q. Song, H. Zhou, Y. Ou, H. Deng and L. T. Yang, "Revisiting Recursive Least
        Squares for Training Deep Neural Networks", 2021.

    Deviations from the paper, none of them on its own path: for ``forgetting < 1`` the trace of
    P is bounded (:data:`torchrls.inverse.MAX_GROWTH`), a P that rounding made indefinite is
    repaired, and a step with a value that is not finite is skipped.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        params: Iterable[Any] | None = None,
        lr: float | Tensor = PAPER["lr"],
        forgetting: float = PAPER["forgetting"],
        ratio: float = PAPER["ratio"],
        momentum: float = PAPER["momentum"],
        l1: float = PAPER["l1"],
        initial_inverse: float = PAPER["initial_inverse"],
        time_scaling: bool = PAPER["time_scaling"],
        max_grad_norm: float | None = PAPER["max_grad_norm"],
        exclude: Any = (),
        fallback: Factory | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"RLS takes the model itself, since it has to see the inputs of its layers: "
                f"RLS(model), got {type(model).__name__}"
            )
        defaults = {
            "lr": lr,
            "forgetting": forgetting,
            "ratio": ratio,
            "momentum": momentum,
            "l1": l1,
            "initial_inverse": initial_inverse,
            "time_scaling": time_scaling,
            "max_grad_norm": max_grad_norm,
        }
        check(defaults)
        self.model = unwrapped(model)
        self.layers: list[Layer] = []
        self.skipped_steps = 0
        self.repaired_inverses = 0
        self._said: set[str] = set()
        self._exclude = listed(exclude)
        self._placement: dict[Any, tuple[torch.dtype, torch.device]] = {}
        self._capture = Capture()
        self._build(params, defaults, torch.optim.Adam if fallback is None else fallback)
        if not self.layers:
            self._warn_once("none", "no layer of the model is trained by RLS; see .summary()")

    def _build(self, params: Iterable[Any] | None, defaults: Group, factory: Factory) -> None:
        """Make the param groups of both optimizers, then look at the layers."""
        routing = Routing(self.model, self._exclude)
        asked = groups.as_groups(routing.names if params is None else params)
        given = {parameter for group in asked for parameter in group["params"]}
        rls = routing.trained_by_rls(given)
        pairs = [groups.split(group, rls, None) for group in asked]
        ours, others = ([g for g in part if g["params"]] for part in zip(*pairs, strict=True))
        self.fallback = groups.make_fallback(factory, others or [{"params": []}])
        super().__init__([{"params": []}], defaults)
        self.param_groups.clear()
        self._names = {**routing.names}
        for group in ours:
            self._append_rls(group)
        for i, group in enumerate(self.fallback.param_groups):
            self._append_fallback(group, others[i] if i < len(others) else {})
        self._share()
        self._observe(routing)

    @classmethod
    def paper(cls, model: nn.Module, **overrides: Any) -> RLS:
        """RLS with exactly the values of section VI of the paper, and ``overrides``.

        Example:
            >>> RLS.paper(torch.nn.Linear(2, 1), momentum=0.5, l1=1e-5).param_groups[0]["ratio"]
            0.1
        """
        return cls(model, **{**PAPER, **overrides})

    # -- param groups ------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters in mid-training: those of the model's layers by RLS, others not.

        The group is split as in the constructor, so that it may become two groups.
        """
        if not hasattr(self, "_names"):  # called by the constructor of torch.optim.Optimizer
            return super().add_param_group(param_group)
        (asked,) = groups.as_groups([param_group])
        known = self._group_of()
        groups.check_disjoint(asked["params"], known)
        routing = Routing(self.model, self._exclude, strict=False)
        rls = routing.trained_by_rls({*asked["params"], *known})
        ours, others = groups.split(asked, rls, self.fallback)
        self._names.update(routing.names)
        if ours["params"]:
            self._append_rls(ours)
        if others["params"]:
            others["param_names"] = groups.names_of(others["params"], self._names)
            self.fallback.add_param_group({k: v for k, v in others.items() if k != "max_grad_norm"})
            self._append_fallback(self.fallback.param_groups[-1], others)
        self._share()
        self._observe(routing)
        return None

    def _append_rls(self, group: Group) -> None:
        names = groups.names_of(group["params"], self._names)
        super().add_param_group({**group, "param_names": names, "method": "rls"})

    def _append_fallback(self, group: Group, wanted: Group) -> None:
        group["param_names"] = groups.names_of(group["params"], self._names)
        group["method"] = "fallback"
        group["max_grad_norm"] = wanted.get("max_grad_norm", self.defaults["max_grad_norm"])
        self.param_groups.append(group)

    def _share(self) -> None:
        """The fallback works on the same groups and the same state as we do."""
        self.fallback.state = self.state
        self.fallback.param_groups = [
            group for group in self.param_groups if group["method"] == "fallback"
        ]

    def _observe(self, routing: Routing) -> None:
        """Start to look at the layers that are new."""
        known, given = {layer.weight for layer in self.layers}, self._group_of()
        new = [layer for layer in routing.layers if layer.weight in given.keys() - known]
        self.layers += new
        self.reasons = routing.reasons
        self._capture.attach(new)

    def _group_of(self) -> dict[Any, Group]:
        return {parameter: group for group in self.param_groups for parameter in group["params"]}

    def _settle_biases(self) -> None:
        """A bias is a row of Theta while its weight is trained, else the fallback trains it."""
        group_of = self._group_of()
        for bias, layers in self._layers_by_bias().items():
            if bias not in group_of or not bias.requires_grad:
                continue
            wanted = all(layer.weight.requires_grad for layer in layers)
            if wanted != (group_of[bias]["method"] == "rls"):
                target = group_of[layers[0].weight] if wanted else self.fallback.param_groups[0]
                groups.move(bias, group_of[bias], target)
                self.state.pop(bias, None)

    def _layers_by_bias(self) -> dict[nn.Parameter, list[Layer]]:
        found: dict[nn.Parameter, list[Layer]] = {}
        for layer in self.layers:
            if layer.bias is not None:
                found.setdefault(layer.bias, []).append(layer)
        return found

    # -- the step ----------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every layer that was observed since the last step.

        Args:
            closure: clears the gradients, computes the loss and its gradients, and returns it.
        """
        if self._capture.closed:
            raise RuntimeError("this optimizer has been closed; make a new one to train on")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle_biases()
        self._follow_moves()
        updates = self._updates()
        if self._is_fit(updates):
            norm = self._gradient_norm()
            self._step_fallback(norm)
            for update in updates:
                update.apply(norm)
        self._capture.drop()
        return loss

    def _updates(self) -> list[Update]:
        """What every observed layer is going to do; changes nothing."""
        group_of, updates = self._group_of(), []
        for layer in self.layers:
            observation = self._capture.records[layer].take()
            if layer.weight.grad is None:
                continue
            if observation is None:
                self._warn_unobserved(layer)
            else:
                updates.append(Update(layer, observation, group_of, self.state))
        return updates

    def _is_fit(self, updates: list[Update]) -> bool:
        """Whether all is finite, with every P in order; one synchronisation."""
        gradients = [p.grad for p in self._group_of() if p.grad is not None]
        dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        values = [value for value in (*dense, *(u.x for u in updates)) if value.numel()]
        extremes = [extreme for value in values for extreme in value.aminmax()]
        fetched = _fetch([*extremes, *(update.margin for update in updates)])
        if all(math.isfinite(extreme) for (extreme,) in fetched[: len(extremes)]):
            margins = zip(updates, fetched[len(extremes) :], strict=True)
            if all(self._repair(update) for update, margin in margins if not is_sound(margin)):
                return True
        self.skipped_steps += 1
        self._warn_once(
            "skipped",
            "a gradient or the input of a layer is not finite: this step changes nothing; "
            "optimizer.skipped_steps counts such steps",
        )
        return False

    def _repair(self, update: Update) -> bool:
        if not update.repair():
            return False
        self.repaired_inverses += 1
        self._warn_once(
            f"repaired {update.layer.name}",
            f"rounding made P of layer {update.layer.name!r} indefinite; it has been repaired. "
            f"Inputs of a large scale cause this: standardize them. "
            f"optimizer.repaired_inverses counts such repairs",
        )
        return True

    def _gradient_norm(self) -> Tensor | None:
        """The norm of all gradients together, if a group asks for clipping."""
        if all(group["max_grad_norm"] is None for group in self.param_groups):
            return None
        return get_total_norm([p.grad for p in self._group_of() if p.grad is not None])

    def _step_fallback(self, norm: Tensor | None) -> None:
        """A step of the fallback on clipped gradients; ``.grad`` is then what it was."""
        clipped = [] if norm is None else self.fallback.param_groups
        own = [(p, p.grad, g) for g in clipped for p in g["params"] if p.grad is not None]
        try:
            for parameter, gradient, group in own:
                parameter.grad = gradient * clip_factor(group, norm)
            self.fallback.step()
        finally:
            for parameter, gradient, _ in own:
                parameter.grad = gradient

    def _follow_moves(self) -> None:
        """State goes where its parameter went: another device, another dtype."""
        for parameter, group in self._group_of().items():
            place = (parameter.dtype, parameter.device)
            old = self._placement.setdefault(parameter, place)
            if old != place:
                self._placement[parameter] = place
                checkpoint.move_state(self.state[parameter], old, place, group["method"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and forget what backward passes observed since the last step."""
        super().zero_grad(set_to_none)
        self._capture.drop()

    # -- warnings ----------------------------------------------------------------------------

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            warnings.warn(text, RLSWarning, stacklevel=3)

    def _warn_unobserved(self, layer: Layer) -> None:
        key = f"unobserved {layer.name}"
        if key not in self._said and layer.weight.grad is not None and layer.weight.grad.any():
            self._warn_once(
                key,
                f"layer {layer.name!r} has a gradient, but RLS did not see its inputs, so it is "
                f"not trained: its weight is used without calling the module, or only some of "
                f"the gradients were asked for. Put it into exclude to train it by the fallback",
            )

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer; the fallback's state is in it, and what it takes to check it."""
        saved = super().state_dict()
        for packed, group in zip(saved["param_groups"], self.param_groups, strict=True):
            packed["param_shapes"] = [list(parameter.shape) for parameter in group["params"]]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, to the bit.

        Raises:
            ValueError: if it was taken from another model or another arrangement of groups; the
                first layer that differs is named, and nothing is changed.
        """
        checkpoint.check(state_dict, self)
        checkpoint.adopt_membership(state_dict, self)
        super().load_state_dict(state_dict)
        checkpoint.restore_precision(state_dict, self)
        self._placement.clear()
        self._capture.drop()

    def __getstate__(self) -> dict[str, Any]:
        kept = (
            *("model", "layers", "reasons", "fallback", "skipped_steps", "repaired_inverses"),
            *("_said", "_exclude", "_names", "_placement"),
        )
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.pop("param_shapes", None)
        self._share()
        if "layers" in state:
            self._capture = Capture()
            self._capture.attach(self.layers)

    # -- for the user ------------------------------------------------------------------------

    def summary(self) -> None:
        """Print which parameter is trained by what, the size of each P and the memory."""
        print(report.summary(self))

    def memory_estimate(self) -> int:
        """The bytes that the state will take when all layers are trained; allocates nothing."""
        return report.memory_estimate(self)

    def rows(self, mask: Tensor) -> AbstractContextManager[None]:
        """For padded batches: within this context, only the rows where ``mask`` is True count.

        Args:
            mask: bool, of shape (batch, time). Layers whose inputs have these leading
                dimensions heed it; other layers, such as a head on the last state, do not.

        Example:
            >>> model = torch.nn.Linear(3, 2)
            >>> optimizer = RLS(model)
            >>> x, lengths = torch.randn(4, 5, 3), torch.tensor([5, 2, 3, 1])
            >>> with optimizer.rows(torch.arange(5) < lengths[:, None]):
            ...     output = model(x)
        """
        return masked_rows(mask)

    def close(self) -> None:
        """Remove every trace from the model; also on leaving ``with RLS(model) as optimizer``."""
        self._capture.close()

    def __enter__(self) -> RLS:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _fetch(tensors: list[Tensor]) -> list[list[float]]:
    """The numbers of some small tensors, in one synchronisation."""
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1).to(tensors[0].device) for tensor in tensors])
    numbers = iter(flat.tolist())
    return [[next(numbers) for _ in range(tensor.numel())] for tensor in tensors]
