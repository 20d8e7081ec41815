"""The warnings of an optimizer while it trains, each given once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torchrls.common.warn import Notices
from torchrls.distributed.ranks import are_several
from torchrls.layers.layer import Layer
from torchrls.routing.groups import Group, is_row_of_theta


def idle(notices: Notices, model: nn.Module, names: dict[Any, str], parameters: Any) -> None:
    """Warn of parameters without a gradient that are not in the model, and if none has a gradient.

    Args:
        names: the name of each parameter; one that never was in the model is "outside.0" or so.
        parameters: all that the optimizer trains.
    """
    lost = []
    for parameter in parameters:
        name = names.get(parameter, "outside.")
        if parameter.grad is None and parameter.requires_grad and not name.startswith("outside."):
            if is_at(model, name, parameter) or notices.has(f"lost {name}"):
                continue
            notices.add(f"lost {name}")  # or it has another name by now
            if all(parameter is not other for other in model.parameters()):
                lost.append(repr(name))
    if lost:
        shown = ", ".join(lost[:4]) + (", ..." if len(lost) > 4 else "")
        notices.once(
            f"lost {lost[0]}",
            f"the model has no {shown} any more that "
            f"this optimizer was made for, so nothing is done there: make the optimizer after "
            f"fully_shard, and after modules or parameters have been replaced",
        )
    if all(parameter.grad is None for parameter in parameters) and not are_several():
        notices.once(
            "nothing",
            "no parameter of this optimizer has a gradient, so this step changes nothing: make "
            "the optimizer for the model that is trained, and not for a copy of it, call "
            "backward() before step(), and unfreeze what is to be trained",
        )


def is_at(model: nn.Module, name: str, parameter: Tensor) -> bool:
    """Return whether the model has the parameter under this name."""
    try:
        return model.get_parameter(name) is parameter
    except AttributeError:
        return False


#: Learning rates of the default step below this are taken for Adam's.
SMALL_RATE = 0.03
#: The number of steps after which a rate is looked at again, since it should have risen by then.
WARMED_UP = 100


def is_small_rate(group: dict[str, Any]) -> bool:
    """Return whether the learning rate of a param group is much too small for the default step."""
    if group["method"] != "rls" or group["step"] != "adaptive" or not group["params"]:
        return False
    return 0 < float(group.get("initial_lr", group["lr"])) < SMALL_RATE


def small_rates(notices: Notices, groups: list[dict[str, Any]]) -> None:
    """Warn of learning rates that were probably meant for Adam."""
    small = [float(group["lr"]) for group in groups if is_small_rate(group)]
    if small:
        notices.once(
            "rate",
            f"lr={small[0]:g} trains hardly at all: lr is a factor of step sizes that RLS chooses "
            f"by itself, and 1 is right for most networks. Leave it out, or say "
            f"lr=0.3 to tread carefully",
        )


def ended(notices: Notices, group: dict[str, Any]) -> None:
    """Warn of a step after the last one of ``total_steps``."""
    notices.once(
        "ended",
        f"all total_steps={group['total_steps']} have been taken, so that the rate is zero and "
        f"nothing changes any more. To go on, set optimizer.param_groups[0]['total_steps'] to "
        f"a larger number, or to None",
    )


def other_ends(notices: Notices, asked: list[int | None], groups: list[dict[str, Any]]) -> None:
    """Warn if a checkpoint has brought another ``total_steps`` than what groups had before."""
    for total, group in zip(asked, groups, strict=True):
        if total not in (None, group.get("total_steps")):
            notices.once(
                "other end",
                f"total_steps={group['total_steps']} of the checkpoint replaces total_steps={total}"
                f": to train to another end, set optimizer.param_groups[0]['total_steps'] after "
                f"loading",
            )


def unobserved(notices: Notices, layers: list[Layer]) -> None:
    """Warn of layers with a gradient whose rows were not seen."""
    new = [layer.name for layer in layers if not notices.has(f"unobserved {layer.name}")]
    if not new:
        return
    names = ", ".join(map(repr, new))
    subject = f"layer {names} has a gradient, but RLS did not see its inputs"
    if len(new) > 1:
        subject = f"layers {names} have gradients, but RLS did not see their inputs"
    notices.once(
        f"unobserved {new[0]}",
        f"{subject} since the last step, so P does not learn there. This is so when a "
        f"weight is used without calling its module (exclude the module), when step() is "
        f"called twice on one backward pass, or when torch.compile had compiled the model "
        f"before this optimizer was made (call torch.compiler.reset() once)",
    )
    notices.add(*(f"unobserved {name}" for name in new))


def bias_alone(notices: Notices, layer: Layer, weights: list[nn.Parameter]) -> None:
    """Warn of a bias with a gradient if none of the weights beside it has one.

    Where the weight has been replaced in its module, that is what :func:`idle` says.
    """
    name, users = layer.block.weight, [module for module, _ in layer.users]
    is_there = any(module._parameters.get(name) is layer.weight for module in users)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if layer.bias is not None and layer.bias.grad is not None and is_there and not gradients:
        notices.once(
            "bias alone",
            f"the bias of layer {layer.name!r} has a gradient and its weight has none, so nothing "
            f"is done there: freeze the weight (requires_grad_(False)), and the fallback trains "
            f"the bias",
        )


def has_values(layer: Layer, group_of: Mapping[Any, Group]) -> bool:
    """Return whether Theta has a gradient that is not zero; may wait for the device."""
    parts = [layer.weight.grad]
    if layer.bias is not None and is_row_of_theta(layer.bias, group_of):
        parts.append(layer.bias.grad)
    return any(bool(part.any()) for part in parts if part is not None)


def skipped(notices: Notices, culprit: str) -> None:
    """Warn of a step that was skipped because of something that is not finite."""
    notices.once(
        "skipped",
        f"{culprit} is not finite, so this step changes nothing; "
        f"optimizer.skipped_steps counts such steps. If the loss has been growing, "
        f"training has diverged: start again with a smaller lr, or, with step='gain', "
        f"with max_grad_norm=5.0 (the paper clips) and inputs scaled to [0, 1]",
    )


def repaired(notices: Notices, layer: Layer) -> None:
    """Warn of a P that was repaired."""
    notices.once(
        f"repaired {layer.name}",
        f"rounding made P of layer {layer.name!r} indefinite; it has been repaired. "
        f"Inputs of a large scale cause this: scale them to [0, 1]. "
        f"optimizer.repaired_inverses counts such repairs",
    )
