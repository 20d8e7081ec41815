"""RLS inside of Lightning, transformers, Accelerate and skorch does what a loop by hand does."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from sklearn.model_selection import GridSearchCV, cross_val_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.pytorch_utils import Conv1D

from models import same
from torchrls import RLS
from torchrls.layers.adapter import adapter_for

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"

#: The default, and the paper's with what it can do.
KINDS: dict[str, Callable[[nn.Module], RLS]] = {
    "default": RLS,
    "paper": lambda model: RLS.paper(model, momentum=0.5, l1=1e-3, max_grad_norm=5.0),
}
kinds = pytest.mark.parametrize("kind", KINDS)

pytestmark = [  # what Lightning 2.6 says about itself and about loaders without workers
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]


def by_hand(
    optimizer: RLS,
    batches: Iterable[Tensor],
    loss_of: Callable[..., Tensor],
    *,
    accumulate: int = 1,
    clip: float | None = None,
    scheduled: bool = False,
) -> None:
    """The loop that every framework has inside; Trainer's has a scheduler."""
    if scheduled:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for i, batch in enumerate(batches, start=1):
        (loss_of(optimizer.model, batch) / accumulate).backward()
        if i % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(optimizer.model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def flowers(samples: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def network() -> nn.Sequential:
    """Both RLS and the fallback have work."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def classification_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


# -- Lightning -------------------------------------------------------------------------------


class Module(lightning.LightningModule):
    def __init__(self, kind: str = "default") -> None:
        super().__init__()
        self.network, self.kind = network(), kind

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return classification_loss(self, batch)

    def configure_optimizers(self) -> RLS:
        return KINDS[self.kind](self)


class Scheduled(Module):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)]


class Manual(Module):
    automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(classification_loss(self, batch))
        optimizer.step()


def fit(module: Module, *, path: Path | None = None, epochs: int = 3, **options):
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    options = {"accelerator": "cpu", "max_epochs": epochs, **quiet, **options}
    trainer = lightning.Trainer(**options)
    trainer.fit(module, DataLoader(flowers(), batch_size=8), ckpt_path=path)
    return trainer


def module_by_hand(kind: str, *, epochs: int = 3, **options) -> tuple[nn.Module, RLS]:
    module = Module(kind)
    optimizer = KINDS[kind](module)
    batches = epochs * list(DataLoader(flowers(), batch_size=8))
    by_hand(optimizer, batches, classification_loss, **options)
    return module, optimizer


@kinds
@pytest.mark.parametrize("accumulate", [1, 3])
def test_lightning_is_the_loop_by_hand(kind, accumulate):
    module = Module(kind)
    fit(module, accumulate_grad_batches=accumulate)
    expected = module_by_hand(kind, accumulate=accumulate)
    assert same((module, module.optimizers().optimizer), expected)


@pytest.mark.usefixtures("double")
@kinds
@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping_in_lightning(kind, accumulate):
    """The norm is taken of the parameters in another order."""
    module = Module(kind)
    fit(module, accumulate_grad_batches=accumulate, gradient_clip_val=0.1)
    expected = module_by_hand(kind, accumulate=accumulate, clip=0.1)
    assert same((module, module.optimizers().optimizer), expected, rtol=1e-11)
    assert not same(module_by_hand(kind, accumulate=accumulate), expected, rtol=1e-3)


@kinds
def test_manual_optimization_in_lightning(kind):
    module = Manual(kind)
    fit(module)
    assert same((module, module.optimizers().optimizer), module_by_hand(kind))


@kinds
def test_lightning_resumes_to_the_bit(kind, tmp_path):
    """With a scheduler, accumulation and clipping."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    whole, half, resumed = (Scheduled(kind) for _ in range(3))
    nn.init.zeros_(resumed.network[0].weight)
    fit(whole, epochs=4, **options)
    fit(half, epochs=2, **options).save_checkpoint(tmp_path / "half.ckpt")
    assert not torch.equal(half.network[0].weight, whole.network[0].weight)
    fit(resumed, path=tmp_path / "half.ckpt", epochs=4, **options)
    optimizers = [module.optimizers().optimizer for module in (whole, resumed)]
    assert same((whole, optimizers[0]), (resumed, optimizers[1]))
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"] < 1


def test_what_lightning_wraps_is_still_rls(capsys):
    module = Module()
    fit(module, epochs=1)
    optimizer = module.optimizers()
    assert isinstance(optimizer, RLS)
    assert optimizer.skipped_steps == 0
    optimizer.summary()
    assert "network.0.weight" in capsys.readouterr().out


# -- Hugging Face: the layer -----------------------------------------------------------------


def as_linear(layer: Conv1D) -> nn.Linear:
    """The same layer, with the weight stored as (outputs, inputs)."""
    linear = nn.Linear(layer.nx, layer.nf)
    with torch.no_grad():
        linear.weight.copy_(layer.weight.T)
        linear.bias.copy_(layer.bias)
    return linear


def with_linear(model: nn.Module) -> nn.Module:
    """A copy of a model that has Linear in place of every Conv1D."""
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        if isinstance(module, Conv1D):
            twin.set_submodule(name, as_linear(module))
    return twin


def assert_twins(model: nn.Module, twin: nn.Module, rtol: float = 1e-9) -> None:
    pairs = zip(model.named_modules(), twin.modules(), strict=True)
    for (name, one), other in pairs:
        for key, value in one.named_parameters(recurse=False):
            expected = getattr(other, key)
            transposed = isinstance(one, Conv1D) and key == "weight"
            expected = expected.T if transposed else expected
            torch.testing.assert_close(value, expected, rtol=rtol, atol=rtol, msg=name or None)


NETWORKS = {
    "small": (4, lambda: nn.Sequential(Conv1D(5, 4), nn.Tanh(), Conv1D(3, 5))),
    "alike": (4, lambda: nn.Sequential(Conv1D(4, 4), nn.Tanh(), Conv1D(4, 4), Conv1D(3, 4))),
    "wide": (300, lambda: nn.Sequential(Conv1D(400, 300), nn.Tanh(), Conv1D(3, 400))),
}
OPTIONS = {
    "default": RLS,
    "default with decay": lambda model: RLS(model, weight_decay=0.1, l1=1e-3, forgetting=0.99),
    "paper": lambda model: RLS.paper(model, momentum=0.5, l1=1e-3),
    "paper, clipped": lambda model: RLS.paper(model, momentum=0.5, l1=1e-3, max_grad_norm=0.1),
    "paper, low rank": lambda model: RLS.paper(model, momentum=0.9, rank=3),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("shape", [(8,), (4, 3)], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", NETWORKS)
def test_conv1d_is_linear_with_its_weight_transposed(size, options, shape):
    inputs, make = NETWORKS[size]
    model = make()
    twin = with_linear(model)
    optimizers = [OPTIONS[options](each) for each in (model, twin)]
    for _ in range(4):
        x, y = torch.randn(*shape, inputs), torch.randn(*shape, 3)
        for optimizer in optimizers:
            optimizer.zero_grad()
            (optimizer.model(x) - y).square().mean().backward()
            optimizer.step()
        assert_twins(model, twin)
    for one, other in zip(*(optimizer.layers for optimizer in optimizers), strict=True):
        states = [
            optimizer.state[layer.weight]
            for optimizer, layer in zip(optimizers, (one, other), strict=True)
        ]
        for key in {"inverse", "directions"} & states[0].keys():
            torch.testing.assert_close(states[0][key], states[1][key], rtol=1e-8, atol=1e-8)


def test_conv1d_of_a_subclass_has_the_adapter_too():
    class Own(Conv1D):
        pass

    assert adapter_for(Own(3, 4)) is not None


# -- Hugging Face: GPT-2 ---------------------------------------------------------------------


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        n_positions=8,
        vocab_size=11,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    )
    return GPT2LMHeadModel(config)


def sentences(samples: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    start = torch.randint(11, (samples, 1), generator=generator)
    return (start + torch.arange(8)) % 11


def language_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return model(input_ids=rows, labels=rows).loss


def test_all_conv1d_of_gpt2_are_trained_by_rls(capsys):
    model = gpt2()
    optimizer = RLS(model)
    results = {name for name, module in model.named_modules() if isinstance(module, Conv1D)}
    assert len(results) == 8
    assert {layer.name for layer in optimizer.layers} == results
    optimizer.summary()
    tied = "Adam (shared by Embedding 'transformer.wte' and Linear 'lm_head'"
    assert tied in capsys.readouterr().out


@pytest.mark.usefixtures("double")
@kinds
def test_gpt2_is_what_it_is_with_linear_layers(kind):
    model = gpt2()
    twin = with_linear(model)
    twin.tie_weights()
    for each in (model, twin):
        by_hand(KINDS[kind](each), sentences().split(8), language_loss)
    assert_twins(model, twin, rtol=1e-7)
    moved = model.transformer.h[1].mlp.c_proj.weight - gpt2().transformer.h[1].mlp.c_proj.weight
    assert moved.abs().min() > 0


# -- Hugging Face: Trainer -------------------------------------------------------------------


@pytest.fixture
def accelerators():
    """Accelerate keeps its settings for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def arguments(folder: Path, **options) -> TrainingArguments:
    chosen = {"max_steps": 6, "per_device_train_batch_size": 4, "lr_scheduler_type": "constant"}
    quiet = {"report_to": "none", "logging_strategy": "no", "disable_tqdm": True}
    return TrainingArguments(folder, use_cpu=True, **quiet, **{**chosen, **options})


def examples() -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in sentences()]


def trainer(optimizer: RLS, folder: Path, **options) -> Trainer:
    given = {"train_dataset": examples(), "optimizers": (optimizer, None)}
    return Trainer(optimizer.model, arguments(folder, **options), **given)


def record(model: nn.Module) -> list[dict[str, Tensor]]:
    """What a model will be called with."""
    seen: list[dict[str, Tensor]] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    return seen


def trainers_loss(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """The Trainer has divided by the characters of all minibatches of a step already."""
    return model(**given).loss * (given["num_items_in_batch"] / given["labels"].numel())


@pytest.mark.usefixtures("accelerators")
@kinds
@pytest.mark.parametrize(("accumulate", "clip"), [(1, 0.0), (2, 0.0), (2, 0.1)])
def test_trainer_is_the_loop_by_hand(kind, accumulate, clip, tmp_path):
    model, twin = gpt2(), gpt2()
    seen, optimizer = record(model), KINDS[kind](model)
    options = {"gradient_accumulation_steps": accumulate, "max_grad_norm": clip}
    trainer(optimizer, tmp_path, **options).train()
    assert len(seen) == 6 * accumulate
    expected = KINDS[kind](twin)
    by_hand(expected, seen, trainers_loss, accumulate=accumulate, clip=clip or None, scheduled=True)
    assert same((model, optimizer), (twin, expected))


@pytest.mark.usefixtures("accelerators")
@kinds
def test_trainer_resumes_to_the_bit(kind, tmp_path):
    options = {"save_steps": 3, "lr_scheduler_type": "linear", "gradient_accumulation_steps": 2}
    pairs = []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        model = gpt2()
        optimizer = KINDS[kind](model)
        results = trainer(optimizer, tmp_path, **options)
        results.train(resume_from_checkpoint=checkpoint)
        pairs.append((model, optimizer))
    assert same(*pairs)


class RLSTrainer(Trainer):
    """For ``model_init``, where the model is made after the Trainer."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self.optimizer = RLS(self.model if model is None else model)
        return self.optimizer


@pytest.mark.usefixtures("accelerators")
def test_trainer_that_makes_the_model_itself(tmp_path):
    records = []

    def recorded() -> GPT2LMHeadModel:
        model = gpt2()
        records.append(record(model))
        return model

    options = {"train_dataset": examples(), "model_init": recorded}
    made = RLSTrainer(args=arguments(tmp_path), **options)
    made.train()
    model = gpt2()
    by_hand(RLS(model), records[-1], trainers_loss, clip=1.0, scheduled=True)
    pairs = zip(made.model.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


class PaddedTrainer(Trainer):
    """For padded batches."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args, **kwargs):
        with self.rls.rows(inputs["attention_mask"].bool()):
            return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.usefixtures("accelerators")
@kinds
def test_padded_batches_in_trainer(kind, tmp_path):
    rows = [
        {
            "input_ids": row,
            "labels": row.where(torch.arange(8) < length, -100),
            "attention_mask": (torch.arange(8) < length).long(),
        }
        for row, length in zip(sentences(), 4 * [8, 3, 5, 4, 7, 3, 6, 8], strict=True)
    ]
    model, twin, plain = (gpt2() for _ in range(3))
    seen, optimizer = record(model), KINDS[kind](model)
    options = {"train_dataset": rows, "eval_dataset": rows[:8], "optimizers": (optimizer, None)}
    results = PaddedTrainer(model, arguments(tmp_path, max_grad_norm=0.0), **options)
    results.rls = optimizer
    results.train()
    calls = list(seen)
    assert results.evaluate()["eval_loss"] > 0
    expected, careless = KINDS[kind](twin), KINDS[kind](plain)

    def masked_loss(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
        with expected.rows(given["attention_mask"].bool()):
            return model(**given).loss

    by_hand(expected, calls, masked_loss, scheduled=True)
    by_hand(careless, calls, lambda model, given: model(**given).loss, scheduled=True)
    assert same((model, optimizer), (twin, expected))
    assert not same((model, optimizer), (plain, careless), rtol=1e-4)


# -- Accelerate ------------------------------------------------------------------------------


def accelerated(accelerator: Accelerator, model: nn.Module, optimizer: RLS, rows: Tensor) -> None:
    loader = DataLoader(rows, batch_size=4)
    model, prepared, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(language_loss(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            prepared.step()
            prepared.zero_grad()


@pytest.mark.usefixtures("accelerators")
@kinds
@pytest.mark.parametrize("accumulate", [1, 2])
def test_accelerate_is_the_loop_by_hand(kind, accumulate):
    model, twin = gpt2(), gpt2()
    optimizer, expected = KINDS[kind](model), KINDS[kind](twin)
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, cpu=True)
    accelerated(accelerator, model, optimizer, sentences())
    batches = sentences().split(4)
    by_hand(expected, batches, language_loss, accumulate=accumulate, clip=0.1)
    assert same((model, optimizer), (twin, expected))


@pytest.mark.usefixtures("accelerators")
@kinds
def test_accelerate_resumes_to_the_bit(kind, tmp_path):
    rows, pairs = sentences(), []
    for path in (None, tmp_path):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, model = Accelerator(cpu=True), gpt2()
        optimizer = KINDS[kind](model)
        if path is None:
            accelerated(accelerator, model, optimizer, rows[:16])
            accelerator.save_state(tmp_path)
        else:
            accelerator.prepare(model, optimizer, DataLoader(rows[:16], batch_size=4))
            accelerator.load_state(path)
        for batch in rows[16:].split(4):
            by_hand(optimizer, [batch], language_loss)
        pairs.append((model, optimizer))
    assert same(*pairs)


# -- skorch ----------------------------------------------------------------------------------


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.fixture
def classifier(monkeypatch):
    """Makes estimators of the class in the example."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("skorch_digits")
    options = {"criterion": nn.CrossEntropyLoss, "max_epochs": 2, "batch_size": 8}
    quiet = {"train_split": None, "verbose": 0}
    return lambda **more: example.Classifier(Network, **{**options, **quiet, **more})


def arrays() -> tuple[np.ndarray, np.ndarray]:
    x, y = flowers().tensors
    return x.numpy(), y.numpy()


def test_skorch_is_the_loop_by_hand(classifier):
    estimator = classifier(optimizer__momentum=0.5, lr=0.7).fit(*arrays())
    expected = RLS(Network(), momentum=0.5, lr=0.7)
    batches = 2 * list(DataLoader(flowers(), batch_size=8))
    by_hand(expected, batches, classification_loss)
    assert same((estimator.module_, estimator.optimizer_), (expected.model, expected))


def rates(optimizer: RLS) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_rates_of_skorch(classifier):
    estimator = classifier().initialize()
    assert rates(estimator.optimizer_) == rates(RLS(Network()))
    estimator.set_params(lr=0.5)
    assert rates(estimator.optimizer_) == [0.5, 0.5]
    estimator.initialize()
    assert rates(estimator.optimizer_) == rates(RLS(Network(), lr=0.5))


def test_param_groups_of_skorch(classifier):
    groups = [("layers.3.*", {"lr": 0.3})]
    optimizer = classifier(optimizer__param_groups=groups).initialize().optimizer_
    rate_of = {
        name: group["lr"]
        for group in optimizer.param_groups
        for name in group["param_names"]
        if group["method"] == "rls"
    }
    assert rate_of["layers.3.weight"] == rate_of["layers.3.bias"] == 0.3
    assert rate_of["layers.0.weight"] == rate_of["layers.0.bias"] == 1.0


def test_cross_validation_is_training_by_hand(classifier):
    x, y = arrays()
    scores = cross_val_score(classifier(), x, y, cv=[(range(32), range(32, 48))])
    optimizer = RLS(Network())
    batches = 2 * list(DataLoader(TensorDataset(*flowers()[:32]), batch_size=8))
    by_hand(optimizer, batches, classification_loss)
    with torch.no_grad():
        right = optimizer.model(torch.from_numpy(x[32:])).argmax(1).numpy() == y[32:]
    assert scores == pytest.approx([right.mean()])


@pytest.mark.filterwarnings("ignore:lr=1e-09 trains hardly at all")
def test_grid_search_reaches_the_optimizer(classifier):
    grid = {"optimizer__momentum": [0.0, 0.6], "lr": [1e-9, 1.0]}
    search = GridSearchCV(classifier(max_epochs=5), grid, cv=2).fit(*arrays())
    scores = search.cv_results_["mean_test_score"]
    assert [options["lr"] for options in search.cv_results_["params"]] == [1e-9, 1e-9, 1.0, 1.0]
    assert scores[0] == scores[1] < min(scores[2:])
    group = search.best_estimator_.optimizer_.param_groups[0]
    assert group["momentum"] == search.best_params_["optimizer__momentum"]
    assert group["lr"] == 1.0


def test_pickled_skorch_estimators_go_on_to_the_bit(classifier):
    estimator = classifier().fit(*arrays())
    twin = pickle.loads(pickle.dumps(estimator))
    for each in (estimator, twin):
        each.partial_fit(*arrays())
    assert same(*((each.module_, each.optimizer_) for each in (estimator, twin)))


def test_saved_skorch_estimators_go_on_to_the_bit(classifier, tmp_path):
    paths = {"f_params": tmp_path / "module.pt", "f_optimizer": tmp_path / "optimizer.pt"}
    estimator, twin = classifier().fit(*arrays()), classifier().initialize()
    estimator.save_params(**paths)
    twin.load_params(**paths)
    for each in (estimator, twin):
        each.partial_fit(*arrays())
    assert same(*((each.module_, each.optimizer_) for each in (estimator, twin)))


# -- examples --------------------------------------------------------------------------------

RUNS = {
    "lightning_digits": (2, "resumed: test accuracy"),
    "trainer_gpt2": (4, "resumed half-way: same weights True"),
    "accelerate_gpt2": (4, "half-way again:"),
    "skorch_digits": (1, "'optimizer__averages': 16}: accuracy"),
}


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("name", RUNS)
def test_examples_of_frameworks_run(name, monkeypatch, capsys):
    """In a short form."""
    length, result = RUNS[name]
    monkeypatch.syspath_prepend(EXAMPLES)
    importlib.import_module(name).main(length)
    assert result in capsys.readouterr().out


def test_every_example_of_frameworks_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS)
