"""RLS trains real families of models, tiny and with random weights, at its defaults.

Nothing is installed or downloaded: a family whose package is not there is skipped.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from models import same
from torchrls import RLS
from torchrls.common.warn import RLSWarning

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the packages, while models are made
]

#: A model, and a function that computes its loss on new random data.
Made = tuple[nn.Module, Callable[[], Tensor]]

FAMILIES: dict[str, Callable[[], Made]] = {}
#: The layers whose weights a family uses without calling them. RLS has to warn of these alone.
UNSEEN: dict[str, set[str]] = {}


def family(*unseen: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Add the decorated function to the list, with the names of layers in UNSEEN."""

    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        FAMILIES[make.__name__], UNSEEN[make.__name__] = make, {*unseen}
        return make

    return add


# -- language, by transformers ---------------------------------------------------------------

SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SMALL, "intermediate_size": 48}
GROUPED = {**WIDE, "num_key_value_heads": 2}


def hugging_face(name: str, kind: str, **options: Any) -> Any:
    """Return a model of transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name + kind):
        pytest.skip(f"transformers {transformers.__version__} has no {name}{kind}")
    return getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**options))


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 50, shape)


def reads(model: nn.Module) -> Made:
    """Add the loss of a language model, or of an encoder and a decoder, on random tokens."""

    def loss() -> Tensor:
        ids = tokens(4, 12)
        return model(input_ids=ids, labels=ids).loss

    return model, loss


@family()
def llama() -> Made:
    return reads(hugging_face("Llama", "ForCausalLM", **GROUPED))


@family()
def qwen() -> Made:
    """Norms on queries and keys."""
    return reads(hugging_face("Qwen3", "ForCausalLM", **GROUPED, head_dim=8))


@family()
def mixtral() -> Made:
    """Experts in one tensor."""
    return reads(hugging_face("Mixtral", "ForCausalLM", **GROUPED, num_local_experts=4))


@family()
def gpt_oss() -> Made:
    """Experts with biases, and a sink for each head."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return reads(hugging_face("GptOss", "ForCausalLM", **GROUPED, **experts, head_dim=8))


@family()
def deepseek() -> Made:
    """Keys and values of low rank, and experts in groups beside a shared one."""
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    others = {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "v_head_dim": 8}
    options = {**WIDE, **ranks, **experts, **others, "num_key_value_heads": 4}
    return reads(hugging_face("DeepseekV3", "ForCausalLM", **options))


@family()
def gpt2() -> Made:
    """Weights of (inputs, outputs), by Conv1D."""
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return reads(hugging_face("GPT2", "LMHeadModel", **sizes))


@family()
def gpt_neox() -> Made:
    return reads(hugging_face("GPTNeoX", "ForCausalLM", **WIDE))


@family(*(f"backbone.layers.{i}.mixer.{name}" for i in range(2) for name in ("conv1d", "dt_proj")))
def mamba() -> Made:
    """The mixer gives the weights of conv1d and dt_proj to functions."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    return reads(hugging_face("Mamba", "ForCausalLM", **sizes))


@family()
def rwkv() -> Made:
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
    return reads(hugging_face("Rwkv", "ForCausalLM", **sizes, attention_hidden_size=32))


@family()
def bert() -> Made:
    """The head is tied to the embedding."""
    return reads(hugging_face("Bert", "ForMaskedLM", **WIDE))


@family()
def albert() -> Made:
    """One layer is called twice."""
    return reads(hugging_face("Albert", "ForMaskedLM", **WIDE, embedding_size=16))


@family()
def deberta() -> Made:
    """Keys and queries are used for positions, too."""
    positions = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    return reads(hugging_face("DebertaV2", "ForMaskedLM", **WIDE, **positions))


@family()
def xlnet() -> Made:
    """Weights of three dimensions, which no module has."""
    sizes = {"vocab_size": 50, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
    return reads(hugging_face("XLNet", "LMHeadModel", **sizes))


@family()
def reformer() -> Made:
    """Layers are recomputed in the backward pass. Dropout has seeds of its own there."""
    sizes = {"attention_head_size": 8, "feed_forward_size": 48, "max_position_embeddings": 12}
    attention = {"attn_layers": ["local", "local"], "local_attn_chunk_length": 4}
    axes = {"axial_pos_shape": (3, 4), "axial_pos_embds_dim": (16, 16)}
    dropout = {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
    options = {**SMALL, **sizes, **attention, **axes, **dropout, "is_decoder": True}
    return reads(hugging_face("Reformer", "ModelWithLMHead", **options))


@family()
def t5() -> Made:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    options = {"vocab_size": 50, **sizes, "decoder_start_token_id": 0}
    return reads(hugging_face("T5", "ForConditionalGeneration", **options))


# -- images, sound and series, by transformers -----------------------------------------------


def sees(model: nn.Module, size: int = 32) -> Made:
    """Add the loss of a classifier of images."""
    return model, lambda: model(torch.randn(4, 3, size, size), labels=torch.randint(5, (4,))).loss


def image_model(name: str, **options: Any) -> Any:
    return hugging_face(name, "ForImageClassification", num_labels=5, **options)


@family()
def vit() -> Made:
    return sees(image_model("ViT", **WIDE, image_size=32, patch_size=8))


@family()
def swin() -> Made:
    sizes = {"image_size": 32, "patch_size": 4, "window_size": 2, "embed_dim": 16}
    return sees(image_model("Swin", **sizes, depths=[2, 2], num_heads=[2, 4]))


@family()
def cvt() -> Made:
    """Convolutions make queries, keys and values."""
    sizes = {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}
    return sees(image_model("Cvt", **sizes))


@family()
def convnext() -> Made:
    return sees(image_model("ConvNext", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]))


@family()
def resnet() -> Made:
    return sees(image_model("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2]))


@family()
def siglip() -> Made:
    """A text and an image each; the head for images is a MultiheadAttention."""
    text = {**WIDE, "max_position_embeddings": 16, "eos_token_id": 2}
    image = {**WIDE, "image_size": 16, "patch_size": 4}
    model = hugging_face("Siglip", "Model", text_config=text, vision_config=image)

    def loss() -> Tensor:
        given = {"input_ids": tokens(4, 8), "pixel_values": torch.randn(4, 3, 16, 16)}
        return model(**given, return_loss=True).loss

    return model, loss


@family()
def whisper() -> Made:
    special = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "decoder_start")}
    bounds = {"max_source_positions": 16, "max_target_positions": 16, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48}
    options = {"vocab_size": 50, "d_model": 32, **heads, **layers, **special, **bounds}
    model = hugging_face("Whisper", "ForConditionalGeneration", **options)
    return model, lambda: model(input_features=torch.randn(4, 8, 32), labels=tokens(4, 8)).loss


PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "out")]


@family(*(f"wavlm.encoder.layers.{i}.attention.{name}" for i in range(2) for name in PROJECTIONS))
def wavlm() -> Made:
    """Attention gives the weights of its projections to a function of torch.

    What numpy's random numbers would mask is not masked.
    """
    sizes = {"conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 3)}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
    others = {"classifier_proj_size": 16, "apply_spec_augment": False, "layerdrop": 0.0}
    options = {**WIDE, **sizes, **positions, **others, "num_labels": 5}
    model = hugging_face("WavLM", "ForSequenceClassification", **options)
    return model, lambda: model(torch.randn(4, 200), labels=torch.randint(5, (4,))).loss


@family()
def encodec() -> Made:
    """Normed weights of convolutions, and an LSTM."""
    sizes = {"num_filters": 4, "upsampling_ratios": [4, 2], "hidden_size": 16}
    model = hugging_face("Encodec", "Model", **sizes, codebook_dim=16, codebook_size=16)

    def loss() -> Tensor:
        wave = torch.randn(2, 1, 160)
        return mse_loss(model.decoder(model.encoder(wave)), wave)

    return model, loss


@family()
def patchtst() -> Made:
    sizes = {"num_input_channels": 2, "context_length": 24, "prediction_length": 4}
    patches = {"patch_length": 4, "patch_stride": 4, "d_model": 32, "ffn_dim": 48}
    options = {**sizes, **patches, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = hugging_face("PatchTST", "ForPrediction", **options, loss="mse")

    def loss() -> Tensor:
        return model(past_values=torch.randn(4, 24, 2), future_values=torch.randn(4, 4, 2)).loss

    return model, loss


# -- other packages --------------------------------------------------------------------------


def adapted(**options: Any) -> Made:
    """Make a Llama whose weights are frozen, with matrices of low rank beside three of them."""
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **options)
    return reads(peft.get_peft_model(llama()[0], config))


@family()
def lora() -> Made:
    return adapted(lora_dropout=0.1)


@family()
def dora() -> Made:
    return adapted(use_dora=True)


@family()
def unet() -> Made:
    diffusers = pytest.importorskip("diffusers")
    down = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
    up = {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": 4}
    model = diffusers.UNet2DModel(sample_size=8, layers_per_block=1, **down, **up, **sizes)

    def loss() -> Tensor:
        image, noise, times = *torch.randn(2, 4, 3, 8, 8), torch.randint(1000, (4,))
        return mse_loss(model(image, times).sample, noise)

    return model, loss


def graphs(name: str, **options: Any) -> Made:
    """Make a network of torch_geometric that classifies the nodes of a random graph."""
    geometric = pytest.importorskip("torch_geometric.nn")
    model = getattr(geometric, name)(8, 16, num_layers=3, out_channels=5, **options)

    def loss() -> Tensor:
        outputs = model(torch.randn(30, 8), torch.randint(30, (2, 90)))
        return cross_entropy(outputs, torch.randint(5, (30,)))

    return model, loss


@family()
def gcn() -> Made:
    return graphs("GCN")


@family()
def gat() -> Made:
    return graphs("GAT", heads=2)


@family()
def x_transformers() -> Made:
    package = pytest.importorskip("x_transformers")
    layers = package.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True)
    inner = package.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers)
    model = package.AutoregressiveWrapper(inner)
    return model, lambda: model(tokens(4, 12))


# -- the tests -------------------------------------------------------------------------------

families = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def made(name: str, seed: int = 0) -> Made:
    torch.manual_seed(seed)
    model, loss = FAMILIES[name]()
    return model.train(), loss


def take_step(loss: Callable[[], Tensor], optimizer: RLS, number: int) -> None:
    """Train on data and dropout that depend on the number of the step alone."""
    torch.manual_seed(number)
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's own
        warnings.simplefilter("always", RLSWarning)
        value = loss()
    value.backward()
    optimizer.step()


def are_finite(model: nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@families
def test_all_that_has_a_gradient_moves_and_warnings_are_true(name):
    model, loss = made(name)
    first = {key: value.detach().clone() for key, value in model.named_parameters()}

    def moved() -> set[str]:
        return {key for key, value in model.named_parameters() if not value.equal(first[key])}

    had_gradients: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = RLS(model)
        for number in range(10):
            take_step(loss, optimizer, number)
            given = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
            # a gradient that has moved its parameter is not looked at: that would compute it
            seen = given.keys() & moved()
            had_gradients |= seen | {key for key in given.keys() - seen if given[key].any()}
    assert moved() == had_gradients
    assert len(moved()) > 0.8 * sum(value.requires_grad for value in model.parameters())
    assert are_finite(model)
    assert optimizer.skipped_steps == 0
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == bool(UNSEEN[name])
    for text in texts:
        assert "RLS did not see their inputs since the last step, so P does not learn there" in text
        assert {*re.findall("'(.*?)'", text)} == UNSEEN[name]
    idle = {x.name for x in optimizer.layers if x.weight.requires_grad and x.weight.grad is None}
    results = {each.layer for each in optimizer.explain() if each.kind == "unobserved"}
    assert results == UNSEEN[name] | idle


@families
def test_resumes_to_the_bit(name):
    model, loss = made(name)
    optimizer, file = RLS(model), io.BytesIO()
    for number in range(10):
        if number == 5:
            torch.save([model.state_dict(), optimizer.state_dict()], file)
            file.seek(0)
        take_step(loss, optimizer, number)
    twin, loss = made(name, seed=1)
    other = RLS(twin)
    for each, state in zip((twin, other), torch.load(file, weights_only=True), strict=True):
        each.load_state_dict(state)
    for number in range(5, 10):
        take_step(loss, other, number)
    assert same((model, optimizer), (twin, other))


@pytest.mark.parametrize("name", ["llama", "bert", "resnet", "whisper", "lora", "unet", "gcn"])
def test_the_step_of_the_paper_stays_finite(name):
    model, loss = made(name)
    optimizer = RLS.paper(model, lr=0.1, max_grad_norm=1.0)
    for number in range(10):
        take_step(loss, optimizer, number)
    assert are_finite(model)
    assert optimizer.skipped_steps == 0


def test_there_are_twenty_families():
    assert len(FAMILIES) >= 20
