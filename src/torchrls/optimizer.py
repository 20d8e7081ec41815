"""The optimizer: arguments, param groups, the order of a step, and state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from torchrls.common.hyperparameters import DEFAULTS, PAPER, check, check_step, explained
from torchrls.common.shards import is_sharded
from torchrls.common.torch_private import (
    disable_dynamo,
    is_autocast_on,
    renew_compiled,
    without_autocast,
)
from torchrls.common.warn import Notices
from torchrls.distributed.owners import Owners
from torchrls.distributed.ranks import Joining, Ranks, are_several, group_for
from torchrls.layers.layer import Layer
from torchrls.observe.deferred import replaces
from torchrls.observe.exchange import Observations, observed
from torchrls.observe.hooks import Capture
from torchrls.reporting import diagnostics, findings, notices, summary
from torchrls.reporting.diagnostics import Monitor
from torchrls.reporting.findings import Finding
from torchrls.routing import groups
from torchrls.routing.composite import Composite
from torchrls.routing.groups import Factory, Group, is_row_of_theta
from torchrls.routing.relative import RelativeAdam
from torchrls.routing.routing import Routing, joins, listed, unwrapped
from torchrls.saving import state_dict as checkpoint
from torchrls.step import average as averaging
from torchrls.step import decay, default, paper, sets
from torchrls.step.check import Verdict, examine, flag_of
from torchrls.step.slots import Slot, Slots, is_from_data

#: The error of two threads in one optimizer.
BUSY = (
    "another thread is inside of step() of this optimizer: threads that train one model have to "
    "take turns, with a threading.Lock around zero_grad(), forward, backward() and step()"
)


class RLS(Composite, Joining):
    r"""Recursive least squares for deep networks, after Zhang et al.

    The gradient of each layer is multiplied by P, the inverse autocorrelation matrix of its inputs.
    In ``RLS(model)``, P learns the mean inputs of 16 sets of samples in a minibatch, the outputs
    are whitened by a matrix Q likewise, and Adam moves the weights in these whitened coordinates:
    see :mod:`torchrls.step.default`. There is nothing to tune. :meth:`RLS.paper` is the paper's
    algorithm (equations (51)-(55), (63), (98)-(100)), whose step is the gain of RLS itself:

    .. math::
        u &= P \bar x, \qquad h = \lambda + c\, \bar x^T u \\
        \Omega &\leftarrow \alpha \Omega - (\eta / h)\, P G \\
        P &\leftarrow (P - (c / h)\, u u^T) / \lambda \\
        \Theta &\leftarrow \Theta + \Omega - \gamma P\, \mathrm{sgn}(\Theta)

    where :math:`\bar x` is the mean input of the minibatch with a 1 for the bias, and
    :math:`c = k`, or :math:`c = k T` for layers that see T time steps a sample.

    Args:
        model: the network. RLS trains its layers, and the fallback all other parameters.
        params: param groups with hyperparameters of their own; all parameters if None.
        lr: :math:`\eta`, a factor of all steps, which schedulers change. 1 is right for both kinds
            of steps; Adam's learning rates, such as 1e-3, are too small.
        forgetting: :math:`\lambda` in (0, 1]. 1 for data that do not change; 0.99 to 0.999 to
            follow a target that drifts.
        ratio: :math:`k`, the average-approximation ratio factor.
        momentum: :math:`\alpha` in [0, 1); Adam's :math:`\beta_1` in the adaptive step.
        l1: :math:`\gamma`, the L1 regularization factor. In the adaptive step it is decoupled, in
            the unit of ``weight_decay``: a step takes 0.001 of it, times ``lr``, from each weight.
        initial_inverse: :math:`\delta` in :math:`P_0 = \delta I` of the paper's step; "auto" takes
            it from the variance of each layer's inputs in the first minibatch.
        time_scaling: :math:`c = k T` for layers with time, as in the paper, in its step.
        max_grad_norm: scale the gradients as ``clip_grad_norm_(model.parameters())`` would,
            without changing ``.grad``. The adaptive step does not need it.
        rank: keep P of the paper's step as :math:`\delta I - V^T V` with V of ``rank`` x n; None
            for the dense matrix. "auto" takes rank 64 where this would take more than 268 MB.
        factored: keep the minibatch's rows and output gradients, whose product is the gradient,
            from the backward pass to the step, where this saves time. The step is the same, but
            for rounding.
        averages: split the samples of a minibatch into so many sets; P learns the mean row of each
            set. The paper's step has 1; for more, it is :math:`\eta P_s G` with the new P. As many
            as there are samples, with ``ratio=1``, is exact RLS.
        step: "adaptive", or "gain", which is the paper's.
        weight_decay: decoupled, as in AdamW. In the adaptive step, at ``lr=1``, it is that of AdamW
            at a learning rate of 1e-3: ``weight_decay=0.1`` takes 1e-4 of a weight in a step. The
            default fallback beside it does the same.
        total_steps: the number of steps of the whole run, if it is known: the rate rises in the
            first fifth and falls to zero in the last half, for the fallback too. Without it, and
            without a scheduler, adaptive steps become shorter slowly (:mod:`torchrls.step.decay`).
        average: keep an average of the weights, for :meth:`averaged`; one more tensor for each
            parameter. It is for runs whose end is not known.
        exclude: modules, module types or glob patterns of module names to leave to the
            fallback. The paper's hybrid mode (HRLS) is ``exclude=[model.head]``.
        fallback: a function that makes the optimizer of the other parameters from a list of them
            (of dicts, where a group has options of its own). None makes ``torch.optim.Adam``
            beside the paper's step, and beside the adaptive one an Adam with the same ``lr`` and
            steps relative to the size of each parameter (:mod:`torchrls.routing.relative`).
        process_group: of the ranks that train this model together: the rows of all of them make
            one minibatch. None for the default group, as soon as ``torch.distributed`` has one;
            False to train alone.
        shard_inverse: keep the state of each layer on one rank, which takes the layer's steps and
            sends its parameters to the others. See :meth:`consolidate_state_dict`.

    Example:
        >>> import torch
        >>> from torchrls import RLS, LeastSquaresLoss
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 1)
        >>> x = torch.randn(64, 3); y = x.sum(1, keepdim=True)
        >>> optimizer, loss_fn = RLS(model), LeastSquaresLoss()
        >>> for _ in range(300):
        ...     optimizer.zero_grad()
        ...     loss = loss_fn(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        >>> loss.item() < 1e-3
        True

    Reference:
        C. Zhang, Q. Song, H. Zhou, Y. Ou, H. Deng and L. T. Yang, "Revisiting Recursive Least
        Squares for Training Deep Neural Networks", 2021.

    Deviations from the paper, in cases that it does not treat: for ``forgetting < 1`` the trace of
    P is bounded (``torchrls.common.numerics.MAX_GROWTH``), a P that rounding made indefinite is
    repaired, and a step with a value that is not finite is skipped.
    """

    _consolidated: dict[str, Any] | None = None  # the state of all ranks, until the next step
    _recorded_options: list[Any] | None = None  # of the groups, when records were last told
    _several = False  # torch.distributed has been initialized
    _trainable = 0  # the number of parameters that are not frozen
    _last_groups: dict[Any, Group] | None = None  # the groups when they were last settled
    _shows_average = False  # the model has the averaged weights

    @explained
    def __init__(
        self,
        model: nn.Module,
        *,
        params: Iterable[Any] | None = None,
        lr: float | Tensor = DEFAULTS["lr"],
        forgetting: float = DEFAULTS["forgetting"],
        ratio: float = DEFAULTS["ratio"],
        momentum: float = DEFAULTS["momentum"],
        l1: float = DEFAULTS["l1"],
        initial_inverse: float | str = DEFAULTS["initial_inverse"],
        time_scaling: bool = DEFAULTS["time_scaling"],
        max_grad_norm: float | None = DEFAULTS["max_grad_norm"],
        rank: int | str | None = DEFAULTS["rank"],
        factored: bool = DEFAULTS["factored"],
        averages: int = DEFAULTS["averages"],
        step: str = DEFAULTS["step"],
        weight_decay: float = DEFAULTS["weight_decay"],
        total_steps: int | None = DEFAULTS["total_steps"],
        average: bool = False,
        exclude: Any = (),
        fallback: Factory | None = None,
        process_group: Any = None,
        shard_inverse: bool = False,
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
            "rank": rank,
            "factored": factored,
            "averages": averages,
            "step": step,
            "weight_decay": weight_decay,
            "total_steps": total_steps,
        }
        check(defaults)
        Joining.__init__(self)
        self._ranks = Ranks(group_for(model, process_group))
        self._shard_inverse = bool(shard_inverse)
        if not isinstance(average, bool):
            raise TypeError(
                f"average must be True or False, got {average!r}; how fast the average forgets is "
                f"not to be chosen: see torchrls.step.average"
            )
        self._keeps_average = average
        if shard_inverse and process_group is False:
            raise ValueError("shard_inverse=True needs ranks to share with; process_group is False")
        self._owners = Owners(self._ranks)
        self.model = unwrapped(model)
        self.layers: list[Layer] = []
        self.skipped_steps = 0
        self.repaired_inverses = 0
        self._notices = Notices()
        self._exclude = listed(exclude)
        self._placement: dict[Any, tuple[torch.dtype, torch.device]] = {}
        self._shapes: dict[Any, torch.Size] = {}
        self._held: dict[Any, Tensor] = {}  # the entries of parameters that stay
        self._capture = Capture()
        self._slots = Slots()
        self._busy = threading.Lock()  # a step is under way
        self._monitor: Monitor | None = None
        if fallback is None:
            options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
            fallback = groups.adam if step == "gain" else partial(RelativeAdam, **options)
        self._build(params, defaults, fallback)
        renew_compiled(model)
        if not self.layers:
            self._notices.once("none", "no layer of the model is trained by RLS; see .summary()")
        notices.small_rates(self._notices, self.param_groups)

    def _build(self, params: Iterable[Any] | None, defaults: Group, factory: Factory) -> None:
        """Make the param groups of both optimizers, then observe the layers."""
        routing = Routing(self.model, self._exclude)
        asked = groups.as_groups(routing.names if params is None else params)
        given = {parameter for group in asked for parameter in group["params"]}
        shares = isinstance(factory, partial) and factory.func is RelativeAdam
        pairs = []
        for group in asked:
            step = str(group.get("step", defaults["step"]))
            ours = routing.capable(given, step), routing.trained(given, step)
            pairs.append(groups.split(group, *ours, None, shares))
        for mine, _ in pairs:
            check_step({**defaults, **mine})
        self._compose(pairs, factory, {**defaults, "steps": 0}, {**routing.names})
        self._add_layers(routing)

    @classmethod
    def paper(cls, *model: Any, **overrides: Any) -> RLS:
        """Return the paper's RLS: its step, lambda, k, eta and P_0, but for ``overrides``.

        The paper's improvements and its clipping are overrides: momentum 0.5, l1 1e-5 (LSTM
        1e-6), max_grad_norm 5.0 (LSTM 1.0).

        Example:
            >>> RLS.paper(torch.nn.Linear(2, 1), momentum=0.5, l1=1e-5).param_groups[0]["ratio"]
            0.1
        """
        return cls(*model, **{**PAPER, **overrides})  # which says what is wrong with them

    # -- param groups ------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters in mid-training, as a pair of groups: one for RLS, one for the fallback.

        RLS trains those that belong to layers of the model.
        """
        if not hasattr(self, "_names"):  # called by the constructor of torch.optim.Optimizer
            return super().add_param_group(param_group)
        (asked,) = groups.as_groups([param_group])
        known = self._group_of()
        groups.check_disjoint(asked["params"], known)
        routing = Routing(self.model, self._exclude, strict=False)
        given = {*asked["params"], *known}
        step = asked.get("step", self.defaults["step"])
        pair = groups.split(
            *(asked, routing.capable(given, step), routing.trained(given, step)),
            *(self.fallback, isinstance(self.fallback, RelativeAdam)),
        )
        check_step({**self.defaults, **pair[0]})
        self._names.update(routing.names)
        self._append_pair(pair)
        self._share()
        self._add_layers(routing)
        return None

    def _add_layers(self, routing: Routing) -> None:
        """Add the new layers of a routing to ``layers``, and observe them."""
        known, given = {layer.weight for layer in self.layers}, self._group_of()
        ours = {p for p, group in given.items() if group["method"] == "rls"} - known
        new = [layer for layer in routing.layers if layer.weight in ours]
        self._shapes = {p: self._shapes.get(p, p.shape) for p in given}
        self.layers += new
        self.reasons = routing.reasons
        self._weights_of_biases = routing.weights_of_biases
        self._capture.attach(new)
        self._tell_records(given)

    def _tell_records(self, group_of: dict[Any, Group]) -> None:
        """Set what each record keeps in the next forward and backward pass."""
        for layer, record in self._capture.records.items():
            group, state = group_of[layer.weight], self.state.get(layer.weight, {})
            is_large = replaces(0, layer.inputs, layer.outputs)
            # with several ranks, other code sums up the gradients
            record.factored = group["factored"] and is_large and not are_several()
            record.sets = group["averages"]
            is_new = not is_from_data(state) and layer not in self._owners.begun
            record.begins = group["initial_inverse"] == "auto" and is_new
            record.watched = self._monitor is not None
            due = group["step"] != "adaptive" or default.is_due(state)
            record.awake = due or record.watched
            record.leaf()  # of the shape that is wanted now: compiled code cannot make it

    def _settled(self) -> dict[Any, Group]:
        """Return the group of each parameter, after changes of groups and parameters by the user.

        Biases move to the side of their weights, and state to its parameter's dtype and device. The
        fallback begins anew where a parameter has got another shape.
        """
        group_of = self._group_of()
        asked, self._several = ("factored", "averages", "initial_inverse"), are_several()
        told = [self._several, *(g.get(key) for g in self.param_groups for key in asked)]
        if group_of is self._last_groups and told == self._recorded_options:
            return group_of
        changed = [p for p in group_of if p.shape != self._shapes.setdefault(p, p.shape)]
        for parameter in changed:
            stale = parameter.grad is not None and parameter.grad.shape != parameter.shape
            if stale or parameter in self._held or group_of[parameter]["method"] == "rls":
                raise ValueError(
                    f"{self._names[parameter]!r} had the shape {tuple(self._shapes[parameter])} "
                    f"when this optimizer was made, and has {tuple(parameter.shape)} now: make a "
                    f"new one, RLS(model)"
                )
        for parameter in changed:
            self._shapes[parameter] = parameter.shape
            self.state.pop(parameter, None)
        for bias, weights in self._weights_of_biases.items():
            if (
                bias in group_of and bias.requires_grad
            ):  # a row of Theta, if its weights are trained
                method = "rls" if joins(weights, group_of.keys()) else "fallback"
                self._put(bias, group_of[bias], method)
        group_of = self._group_of()
        for parameter, group in group_of.items():  # state follows its parameter
            place = (parameter.dtype, parameter.device)
            old = self._placement.setdefault(parameter, place)
            if old != place:
                self._placement[parameter] = place
                checkpoint.move_state(self.state[parameter], old, place, group["method"])
        self._tell_records(group_of)
        self._trainable = sum(parameter.requires_grad for parameter in group_of)
        self._last_groups, self._recorded_options = group_of, told
        return group_of

    # -- the step ----------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @disable_dynamo
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every layer that was observed since the last step.

        Args:
            closure: clears the gradients, computes the loss and its gradients, and returns it.
        """
        if self._capture.closed:
            raise RuntimeError("this optimizer has been closed; make a new one to train on")
        if self._shows_average:
            raise RuntimeError(
                "step() inside of optimizer.averaged(): the weights are the averaged ones there, "
                "and are given back at the end; train outside of it"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rates: list[tuple[Group, Any]] = []
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(BUSY)
        try:
            with torch.no_grad():
                group_of = self._settled()
                ours = isinstance(self.fallback, RelativeAdam)
                rates = decay.scale_rates(self.param_groups, ours)
                with without_autocast(group_of) if is_autocast_on() else nullcontext():
                    self._update(group_of)
        finally:
            for group, lr in rates:
                group["lr"] = lr
            self._busy.release()
        if self.param_groups[0].get("steps") == notices.WARMED_UP:
            notices.small_rates(self._notices, self.param_groups)  # of a scheduler or a loop
        return loss

    def _update(self, group_of: dict[Any, Group]) -> None:
        """Take a step: observe, respond, check, move. Only the last changes parameters and P."""
        self._consolidated, records, spread = None, self._capture.records, self._is_spread

        # observe
        taking, flag = self._observations(group_of, spread)
        mine = {x: r for x, r in taking.items() if self._owners.is_mine(x)} if spread else taking

        # respond
        slots = self._slots.arrange(mine, group_of, self.state)
        for slot, _ in slots:
            is_default, has_sets = slot.group["step"] == "adaptive", slot.group["averages"] > 1
            slot.algorithm = default if is_default else sets if has_sets else paper
        responses = [slot.algorithm.respond(slot, rows) for slot, rows in slots]

        # check the gradients: of the whole model, if a group asks for clipping
        clips = any(group["max_grad_norm"] is not None for group in self.param_groups)
        parameters = dict.fromkeys([*self.model.parameters(), *group_of]) if clips else group_of
        gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        if len(gradients) < self._trainable or not gradients:
            notices.idle(self._notices, self.model, self._names, group_of)
        verdict = examine(
            *(responses, gradients),
            lambda p: self._names[p] if p in group_of and p.requires_grad else None,
            *(clips, flag),
        )
        if (verdict.culprit or verdict.repaired or spread) and not self._is_fit(verdict):
            return

        # move
        held = [(p, p.detach().clone(), where) for p, where in self._held.items()]
        if any(group["params"] for group in self.fallback.param_groups):
            self._step_fallback(verdict.norm)
        if self._monitor is not None:
            self._monitor.look_at({x: rows for x, rows in mine.items() if rows is not None})
        for response in reversed(responses):  # the last P that was read is still in the cache
            slot = response.slot
            with nullcontext() if self._monitor is None else self._monitor.watching(response):
                slot.algorithm.move(response, verdict.norm)
            for layer, state in zip(slot.layers, slot.state, strict=True):
                if layer in records:
                    records[layer].awake = slot.wants_rows or self._monitor is not None
                    records[layer].begins = records[layer].begins and not is_from_data(state)
        for parameter, before, where in held:
            parameter.copy_(torch.where(where.to(parameter.device), before, parameter))
        for group in self.param_groups if responses or not self.layers else ():
            if group["method"] == "rls":
                if group["total_steps"] is not None and group["steps"] >= group["total_steps"]:
                    notices.ended(self._notices, group)
                group["steps"] += 1
        if self._keeps_average:
            averaging.update_(self._averages(), self.param_groups[0]["steps"])
        if spread:
            moved: dict[Layer, list[Tensor]] = {layer: [layer.weight] for layer in taking}
            for layer, tensors in moved.items():
                if layer.bias is not None and is_row_of_theta(layer.bias, group_of):
                    tensors.append(layer.bias)
                if layer in records and taking[layer] is not None:
                    records[layer].begins = False
            self._owners.share(moved)
            self._owners.begun |= moved.keys()

    def _flag(self, gradients: list[Tensor]) -> Tensor:
        records = list(self._capture.records.values())
        return flag_of(gradients, records[0].nothing() if records else torch.zeros(()))

    def _shadow(self) -> None:
        """Take part in the exchanges of one step of the other ranks, with no rows."""
        for record in self._capture.records.values():
            record.drop()
        records = self._capture.records
        observed(records, self._ranks, self._flag([]))
        for record in records.values():
            record.begins = False

    def _observations(
        self, group_of: dict[Any, Group], spread: bool
    ) -> tuple[Observations, Tensor | None]:
        """Return the layers that take a step, on any rank, with their rows; and the ranks' flag.

        The records are emptied. Warn of layers with a gradient whose P does not learn.

        Args:
            spread: the state of each layer is on one of several ranks.
        """
        records, flag = self._capture.records, None
        if not self._several or self._ranks.count == 1:
            observations = {layer: record.observation() for layer, record in records.items()}
        else:
            self._notify_join()
            flag = self._flag([p.grad for p in group_of if p.grad is not None])
            observations, flag = observed(records, self._ranks, flag)
        taking: Observations = {}
        unobserved, blind = [], []
        if spread:
            self._owners.assign(self.layers)
        for layer in self.layers:
            rows, gradient = observations.get(layer), layer.weight.grad
            if gradient is None or not layer.weight.requires_grad:
                bias = layer.bias if layer.weight.requires_grad else None
                if bias is not None and is_row_of_theta(bias, group_of):
                    weights = self._weights_of_biases.get(bias, [])
                    notices.bias_alone(self._notices, layer, weights)
                continue
            if rows is not None:
                taking[layer] = rows
                continue
            has_state = bool(self.state.get(layer.weight)) or layer in self._owners.begun
            has_state = has_state and group_of[layer.weight]["step"] == "adaptive"
            if has_state or notices.has_values(layer, group_of):
                taking[layer] = None
                if layer.has_rows and layer.inputs > 0 and not has_state:
                    blind.append(layer)
            else:
                unobserved.append(layer)
        if blind:
            notices.unobserved(self._notices, blind)
        for layer in unobserved:
            # torch.distributed.checkpoint takes a step with zero gradients to make the state
            mine = not spread or self._owners.is_mine(layer)
            if mine and not self.state.get(layer.weight):
                slot = Slot((layer,), group_of, self.state)
                default.reserve(slot) if slot.group["step"] == "adaptive" else slot.reserve()
        return taking, flag

    @property
    def _is_spread(self) -> bool:
        """Whether the state of each layer is on one of several ranks."""
        return self._shard_inverse and self._ranks.count > 1

    def _is_fit(self, verdict: Verdict) -> bool:
        """Return whether all ranks can take the step; count and report a skip, or repairs."""
        if self._is_spread:
            fit = self._owners.agree(verdict.culprit is None, self.layers[0].weight.device)
            if verdict.culprit is None and not fit:
                verdict = verdict._replace(culprit="something on another rank")
        if verdict.culprit is not None:
            self.skipped_steps += 1
            notices.skipped(self._notices, verdict.culprit)
            return False
        for layer in verdict.repaired:
            self.repaired_inverses += 1
            notices.repaired(self._notices, layer)
        return True

    @disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and forget what backward passes observed since the last step."""
        if self._busy.locked():
            raise RuntimeError(BUSY)
        if set_to_none:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            super().zero_grad(set_to_none)
        for record in self._capture.records.values():
            record.drop()

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with that of the fallback and the facts that loading checks."""
        if self._is_spread and self._consolidated is None:
            raise RuntimeError(
                "with shard_inverse=True every rank has a part of the state: call "
                "optimizer.consolidate_state_dict(to=0) on all ranks, then state_dict() on rank 0"
            )
        if self._consolidated is not None:
            return self._consolidated
        return self._own_state_dict()

    def _own_state_dict(self) -> dict[str, Any]:
        """Return the state of this rank."""
        self._unstack()
        saved = super().state_dict()
        checkpoint.describe(saved, self)
        return saved

    def _unstack(self) -> None:
        """Copy slices of stacks in the state: a file would have the whole stack for each slice."""
        for state in self.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value._is_view():
                    state[key] = value.clone()

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state of all ranks on one, with ``shard_inverse=True``; all have to call this.

        As with ``torch.distributed.optim.ZeroRedundancyOptimizer``, ``state_dict()`` on the rank
        ``to`` then returns all of it. ``load_state_dict`` takes it on every rank.
        """
        if not self._is_spread:
            return
        saved = self._own_state_dict()
        state = self._owners.gathered(saved["state"], to)
        if state is not None:
            self._consolidated = {**saved, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, so that training goes on where ``state_dict`` was taken, to the bit.

        Raises:
            ValueError: if it was taken from another model or another arrangement of groups; the
                first layer that differs is named, and nothing is changed.
        """
        asked = [group.get("total_steps") for group in self.param_groups]
        handle = self.register_load_state_dict_pre_hook(checkpoint.prepare)  # after the user's
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self.__dict__.pop("_loading", None)
        notices.other_ends(self._notices, asked, self.param_groups)
        group_of = self._group_of()
        self._placement = {p: (p.dtype, p.device) for p in group_of}
        others = {p: p.shape for p, group in group_of.items() if group["method"] == "fallback"}
        self._shapes.update(others)  # the state that was loaded fits them
        self._last_groups = None
        for record in self._capture.records.values():
            record.drop()
        self._consolidated = None
        if self._is_spread:
            self._forget_others()
        self._tell_records(group_of)

    def _forget_others(self) -> None:
        """Remove the state of layers that other ranks own."""
        self._owners.assign(self.layers)
        group_of = self._group_of()
        self._owners.begun = {layer for layer in self.layers if self.state.get(layer.weight)}
        for layer in self.layers:
            if not self._owners.is_mine(layer):
                for parameter in (layer.weight, layer.bias):
                    if parameter is not None and is_row_of_theta(parameter, group_of):
                        self.state.pop(parameter, None)

    def __getstate__(self) -> dict[str, Any]:
        kept = (
            *("model", "layers", "reasons", "fallback", "skipped_steps", "repaired_inverses"),
            *("_notices", "_exclude", "_names", "_placement", "_weights_of_biases", "_monitor"),
            *("_ranks", "_shard_inverse", "_keeps_average", "_shapes", "_held"),
        )
        self._unstack()
        own = {name: self.__dict__[name] for name in kept}
        return {**super().__getstate__(), **own, "_was_closed": self._capture.closed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # an older version may have had fewer hyperparameters
            if group["method"] == "rls":
                for key, value in self.defaults.items():
                    group.setdefault(key, value)
        self._share()
        if "_loading" in self.__dict__:
            checkpoint.restore_precision(self.__dict__.pop("_loading"), self)
        if "layers" in state:  # a copy or an unpickled optimizer, not a loaded state_dict
            Joining.__init__(self)
            self._owners = Owners(self._ranks)
            self._capture = Capture()
            self._slots = Slots()
            self._busy = threading.Lock()
            if self.__dict__.pop("_was_closed"):
                self._capture.close()
            else:
                self._capture.attach(self.layers)
                self._tell_records(self._group_of())

    # -- for the user ------------------------------------------------------------------------

    def summary(self) -> None:
        """Print the rule that trains each parameter, the size of each P and the memory."""
        print(summary.summary(self))

    def memory_estimate(self) -> int:
        """Return the bytes that the state will take, without allocating it."""
        return summary.memory_estimate(self)

    def truncation(self) -> dict[str, float]:
        """Return the share of the trace of P_0 - P that has been cut off, for each P of low rank.

        0 means that P is exact. The keys are the names of these layers.
        """
        return summary.truncation(self)

    def watch(self, on: bool = True) -> None:
        """Watch every step from now on, for :meth:`diagnostics` and :meth:`explain`; or stop.

        Training is the same to the bit. A watched step costs a copy of one weight at a time and
        some norms and sums. Numbers of earlier watched steps are deleted. Where several ranks train
        one model, call it on all of them.
        """
        self._monitor = Monitor() if on else None
        self._tell_records(self._group_of())

    def diagnostics(self, *, condition: bool = True) -> dict[str, dict[str, float]]:
        """Return numbers about every layer that RLS trains: {layer: {number: value}}.

        ``torchrls.reporting.diagnostics`` defines them. Those of P are there once the layer has
        been trained; those of inputs and steps need :meth:`watch` before the step.

        Args:
            condition: add the condition number of P, which takes its eigenvalues.

        Example:
            >>> _ = torch.manual_seed(0)
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = RLS.paper(model)
            >>> optimizer.watch()
            >>> model(torch.ones(4, 2)).sum().backward()
            >>> optimizer.step()
            >>> numbers = optimizer.diagnostics()["Linear"]
            >>> round(numbers["h"], 3), round(numbers["trace"], 3)  # 1 + 0.1 x.x with a 1 for bias
            (1.3, 2.769)
        """
        return diagnostics.numbers(self, condition)

    def explain(self) -> list[Finding]:
        """Print what is unusual and what to try, for a loss that grows or does not fall.

        Call :meth:`watch` some steps before: inputs and steps can be judged only then.

        Returns:
            The findings, most telling first; empty if nothing is unusual.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = RLS(model)
            >>> optimizer.watch()
            >>> model(torch.randn(4, 2)).square().sum().backward()
            >>> optimizer.step()
            >>> optimizer.explain()
            Nothing unusual.
            []
        """
        numbers = diagnostics.numbers(self, condition=False)
        unusual = findings.unusual(self, numbers, summary.fallback_sizes(self)[0])
        trained = any(self.state.values())
        print(findings.text(unusual, watched=self._monitor is not None, trained=trained))
        return unusual

    def _averages(self) -> list[tuple[Tensor, Tensor]]:
        """Return the average and the value of everything that is averaged."""
        trained = [p for p in self._group_of() if p.requires_grad]
        kept = self.param_groups[0].setdefault("average_buffers", {})
        buffers = averaging.buffers_of(self.model, kept)
        return averaging.pairs_of(trained, self.state) + buffers

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the average of its weights, to be evaluated.

        It needs ``average=True``. Running statistics of norms are averaged as well. On leaving, the
        model gets its own weights back.

        Example:
            >>> model = torch.nn.Linear(3, 2)
            >>> optimizer = RLS(model, average=True)
            >>> for _ in range(3):
            ...     optimizer.zero_grad()
            ...     model(torch.randn(8, 3)).square().sum().backward()
            ...     optimizer.step()
            >>> last = model.weight.detach().clone()
            >>> with optimizer.averaged():
            ...     bool((model.weight != last).all())
            True
            >>> bool((model.weight == last).all())
            True
        """
        if not self._keeps_average:
            raise RuntimeError(
                "this optimizer keeps no average of the weights: make it with average=True"
            )
        return self._with_average()

    @contextmanager
    def _with_average(self) -> Iterator[None]:
        self._shows_average = True
        try:
            with averaging.exchanged(self._averages()):
                yield
        finally:
            self._shows_average = False

    def rows(self, mask: Tensor, *, time_first: bool = False) -> AbstractContextManager[None]:
        """Return a context in which padded rows are not observed.

        They enter neither P nor its first value, nor the mean and ranges of inputs, nor T.
        Gradients are not masked: mask the loss, too.

        The mask applies to layers whose inputs have its leading dimensions, and not to others, such
        as a head on the last state. It is an error if it applies to none.

        Args:
            mask: bool, of shape (batch, time), or (batch,) for inputs without time.
            time_first: the inputs of Linear layers are (time, batch, features). Recurrent and
                attention layers know their own layout.

        Example:
            >>> model = torch.nn.Linear(3, 2)
            >>> optimizer = RLS(model)
            >>> x, lengths = torch.randn(4, 5, 3), torch.tensor([5, 2, 3, 1])
            >>> with optimizer.rows(torch.arange(5) < lengths[:, None]):
            ...     output = model(x)
        """
        return self._capture.masked(mask, time_first)

    def hold(self, parameter: Tensor, where: Tensor | None) -> None:
        """Leave the entries of a parameter as they are, in all steps from now on, where it is True.

        A gradient that is masked with zeros does not hold them: P and Q mix rows and columns. Held
        entries are left alone by weight decay, L1 and the fallback as well; momentum goes on in
        them, and counts once they are released. ``state_dict`` does not have them: hold them again
        in a new optimizer.

        Args:
            parameter: one that this optimizer trains.
            where: bool, of the shape of the parameter; None to let all of its entries move again.

        Example:
            >>> model = torch.nn.Linear(3, 2)
            >>> optimizer = RLS(model)
            >>> pruned = model.weight.abs() < 0.3
            >>> _ = model.weight.data.masked_fill_(pruned, 0)
            >>> optimizer.hold(model.weight, pruned)
            >>> model(torch.randn(8, 3)).square().sum().backward()
            >>> optimizer.step()
            >>> torch.equal(model.weight == 0, pruned)
            True
        """
        if not isinstance(parameter, Tensor) or parameter not in self._group_of():
            raise ValueError("hold() takes a parameter that this optimizer trains")
        if is_sharded(parameter):
            raise ValueError(f"{self._names[parameter]!r} is sharded, and cannot be held")
        if where is None:
            self._held.pop(parameter, None)
            return
        is_mask = isinstance(where, Tensor) and where.dtype == torch.bool
        if not is_mask or where.shape != parameter.shape:
            given = f"{tuple(where.shape)} of {where.dtype}" if isinstance(where, Tensor) else where
            raise ValueError(
                f"the entries of {self._names[parameter]!r} to be held are a bool tensor of its "
                f"shape {tuple(parameter.shape)}, got {given}"
            )
        self._held[parameter] = where.to(parameter.device, copy=True)
        average = self.state.get(parameter, {}).get("average")
        if average is not None:
            average[where] = parameter.detach()[where].to(average.dtype)

    def close(self) -> None:
        """Remove all hooks from the model; also on leaving ``with RLS(model) as optimizer``."""
        self._capture.close()

    def __enter__(self) -> RLS:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
