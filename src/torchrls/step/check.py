"""The check before a step: every gradient is finite, and every P positive definite.

No value has been changed by then. All numbers are fetched in one synchronisation per device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchrls.common.numerics import largest_gradient, statistics_dtype
from torchrls.common.shards import copies, is_sharded, local
from torchrls.common.torch_private import foreach_norm
from torchrls.layers.layer import Layer
from torchrls.matrix.inverse import Dense, FactoredProduct
from torchrls.matrix.whitening import Whitening
from torchrls.observe.deferred import computed, untouched

if TYPE_CHECKING:
    from torchrls.step.gradient import Factored
    from torchrls.step.slots import Slot

#: A parameter with its gradient.
Pair = tuple[Any, Tensor]


@dataclass(kw_only=True)
class Response:
    """The results of a step for a slot before a value is changed: those that the check reads.

    Attributes:
        P: P of this step; None if it has none.
        is_stored: P is the state's own, and is updated in place.
        delta: the scale of P_0 of each layer.
        factored: the factors of G, or None.
        product: P G, if x.u was computed from its part X P; else None.
        x: the rows that P is going to learn; None if there are none.
        energy: x.u of each group, or the trace of B U^T of each group or tile.
        time: T of each group as a tensor, ``times`` as numbers; None for c = k.
        margins: for each group or layer a number that is negative or not finite if its P is not
            positive definite.
    """

    slot: Slot
    P: Any = None
    is_stored: bool = True
    delta: list[float] = field(default_factory=list)
    factored: Factored | None = None
    product: FactoredProduct | None = None
    x: Tensor | None = None
    energy: Tensor | None = None
    time: Tensor | None = None
    times: list[float] | None = None
    margins: list[float] = field(default_factory=list)


class Verdict(NamedTuple):
    """The result of the check before a step.

    Attributes:
        culprit: the name of what is not finite or too large; None if the step can be taken.
        repaired: the layers whose P has been repaired.
        norm: the norm of all gradients together, if a group clips it; else None.
    """

    culprit: str | None
    repaired: list[Layer]
    norm: float | None


def examine(
    responses: Sequence[Response],
    gradients: list[Pair],
    name_of: Callable[[Any], str | None],
    clips: bool,
    flag: Tensor | None = None,
) -> Verdict:
    """Check gradients and responses; settle the responses, and repair their P where that helps.

    Args:
        responses: the responses of all slots.
        gradients: the (parameter, gradient) pairs of all that have a gradient.
        name_of: returns the name of a parameter that is trained, None for others.
        clips: whether the norm of all gradients is needed.
        flag: the sum of :func:`flag_of` over all ranks; None for a single rank.
    """
    # fetch all numbers at once: norms of gradients, x.u and T, questions about factors
    looked_at = gradients
    if not clips:
        probed = {id(p) for r in responses if r.factored is not None for p in r.factored.probed}
        looked_at = [(p, g) for p, g in gradients if p.requires_grad and id(p) not in probed]
    asked = norms([gradient for _, gradient in looked_at])
    counts = [len(asked)]
    for response in responses:
        own = [n for n in (response.energy, response.time) if n is not None]
        if response.factored is not None:
            own += response.factored.questions
        asked += own
        counts.append(len(own))
    numbers = iter(fetch([*asked] if flag is None else [*asked, flag]))

    # is every gradient finite, and every P definite?
    lengths: list[float] = [some[0] for some in islice(numbers, counts[0])]
    pairs = zip(looked_at, lengths, strict=True)
    suspects = [pair for pair, length in pairs if not length < largest_gradient(pair[1].dtype)]
    broken: list[Response] = []
    for response, count in zip(responses, counts[1:], strict=True):
        rest = list(islice(numbers, count))
        energy = rest.pop(0) if response.energy is not None else None
        response.times = rest.pop(0) if response.time is not None else None
        factored = response.factored
        if factored is not None and not factored.judge(rest):
            response.factored = response.product = None
        if factored is not None and factored.is_suspect:
            suspects += [(p, p.grad) for p in factored.probed if p.grad is not None]
        if energy is not None and not response.slot.algorithm.settle(response, energy):
            broken.append(response)
    finite_flag, sharded_square = (0.0, 0.0) if flag is None else next(numbers)

    # which value is at fault, and can P be repaired?
    culprit = None
    if suspects or broken:
        order = {id(parameter): place for place, (parameter, _) in enumerate(gradients)}
        suspects.sort(key=lambda pair: order[id(pair[0])])
        culprit = culprit_of(suspects, name_of, broken)
    if culprit is None and not math.isfinite(finite_flag):
        culprit = "a gradient of another rank"
    repaired: list[Layer] = []
    for response in broken if culprit is None else []:
        layers = repair(response)
        repaired += layers or []
        if layers is None and culprit is None:
            culprit = f"h of layer {response.slot.layer.name!r}"
    norm = None
    if clips:
        both = zip(looked_at, lengths, strict=True)
        here = [size for (_, g), size in both if flag is None or not is_sharded(g)]
        norm = math.hypot(math.sqrt(sharded_square), *here)
    return Verdict(culprit, repaired, norm)


def repair(response: Response) -> list[Layer] | None:
    """Replace the P of a response by positive definite copies, and settle the response again.

    Returns:
        The layers whose P has been repaired, [] if P is definite with u computed as P x; None if
        the repair has failed.
    """
    slot = response.slot

    def is_definite() -> bool:
        slot.algorithm.answer(response)
        assert response.energy is not None, "answer computes it"
        return bool(slot.algorithm.settle(response, response.energy.view(-1).tolist()))

    if response.product is not None:  # near x = 0, rounding can make x.u < 0
        response.product = None
        if is_definite():
            return []
    # a matrix for each layer, or one for each tile of each layer
    layers, is_default = list(slot.layers), isinstance(response.P, Whitening)
    P = Dense(response.P.W) if is_default else response.P
    if len(layers) == 1:
        P = P.repaired(response.delta[0])
    else:
        unsound = [i for i, m in enumerate(response.margins) if not 0 <= m < math.inf]
        layers = [slot.layers[i] for i in unsound] or layers
        P = Dense(P.P.clone())
        parts = P.P.view(len(slot.layers), -1, P.size, P.size)
        for i in unsound or range(len(layers)):
            parts[i] = Dense(parts[i]).repaired(response.delta[i]).P
    response.P = Whitening(P.P, response.P.gain) if is_default else P
    response.is_stored = False
    return layers if is_definite() else None


def culprit_of(
    suspects: list[Pair], name_of: Callable[[Any], str | None], broken: list[Response]
) -> str | None:
    """Name the first gradient or input with an entry that is not finite or too large, or None."""
    for parameter, gradient in suspects:
        name, values = name_of(parameter), values_of(gradient)
        if name is None:
            continue
        if not bool(values.isfinite().all()):
            return f"the gradient of {name!r}"
        if not bool((values.abs() < largest_gradient(values.dtype)).all()):
            return f"the square of the gradient of {name!r}"
    for response in broken:
        layers = response.slot.layers
        assert response.x is not None, "P is settled in steps in which it learns"
        rows = response.x.unbind() if len(layers) > 1 else [response.x]
        for layer, x in zip(layers, rows, strict=True):
            if not bool(x.isfinite().all()):
                return f"the input of layer {layer.name!r}"
    return None


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the norm of each gradient as ``clip_grad_norm_`` does; deferred ones stay deferred."""
    known: dict[int, Tensor] = {}
    plain: list[tuple[int, Tensor]] = []
    halves: list[tuple[int, Tensor]] = []
    for place, tensor in enumerate(tensors):
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            factors = untouched(tensor)
            if factors is not None:
                known[place] = factors.norm()
                continue
            tensor = values_of(tensor)
        is_half = tensor.dtype in (torch.float16, torch.bfloat16)
        (halves if is_half else plain).append((place, tensor))
    if plain:
        places, values = zip(*plain, strict=True)
        known.update(zip(places, foreach_norm(list(values)), strict=True))
    for place, value in halves:
        known[place] = torch.linalg.vector_norm(value, dtype=statistics_dtype(value.dtype))
    return [known[place] for place in range(len(tensors))]


def flag_of(gradients: Iterable[Tensor], like: Tensor) -> Tensor:
    """Return two numbers about a rank's gradients, (2,), to be summed up over the ranks.

    Returns:
        0, or nan if a gradient is not finite or too large; and the squared norm of the shards.

    Example:
        >>> zero = torch.zeros(())
        >>> flag_of([torch.ones(2)], zero), flag_of([torch.tensor([1.0, torch.inf])], zero)
        (tensor([0., 0.]), tensor([nan, 0.]))
    """
    gradients = list(gradients)
    values = [value for gradient in gradients if (value := values_of(gradient)).numel()]
    extremes = foreach_norm(values, torch.inf) if values else ()
    most = torch.finfo(like.dtype).max
    largest = [
        extreme.to(like) * (most / largest_gradient(value.dtype) * 1.001)  # inf if too large
        for extreme, value in zip(extremes, values, strict=True)
    ]
    sharded = [g for g in gradients if is_sharded(g)]
    squares = [n.to(like) ** 2 / copies(g) for n, g in zip(norms(sharded), sharded, strict=True)]
    zero = like.new_zeros(())
    return torch.stack([sum((n * 0 for n in largest), zero), sum(squares, zero)])


def values_of(tensor: Tensor) -> Tensor:
    """Return the entries of a gradient as a plain tensor: of its shard here, of a sparse one."""
    tensor = computed(tensor)
    return tensor.coalesce().values() if tensor.is_sparse else local(tensor)


def fetch(tensors: list[Tensor]) -> list[list[float]]:
    """Return the numbers of small tensors, in one synchronisation per device."""
    elsewhere = {tensor.device for tensor in tensors if not tensor.is_cpu}
    if not elsewhere:
        return [t.tolist() if t.dim() else [t.item()] for t in tensors]
    numbers = {
        device: iter(torch.cat([t.reshape(-1) for t in tensors if t.device == device]).tolist())
        for device in elsewhere
    }
    return [
        list(islice(numbers[t.device], t.numel())) if t.device in numbers else t.view(-1).tolist()
        for t in tensors
    ]
