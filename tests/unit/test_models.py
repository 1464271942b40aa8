"""Shapes, sizes and causality of the models."""

import pytest
import torch

from runs.models import MODELS, make_model

PARAMETERS = {  # of the default shapes; the image models' by hand from the papers' layer lists
    "lstm": 986_624,
    "gpt": 1_020_320,
    "gpt-10m": 10_868_736,
    "gpt-121m": 120_937_728,
    "resnet8": 78_042,
    "resnet20": 272_474,
    "resnet18": 11_173_962,
    "vgg11": 9_228_362,
    "vgg16": 14_724_042,
    "resnet50": 23_520_842,
    "resnet101": 42_512_970,
    "lstm-small": 1_544_192,
    "lstm-medium": 4_444_800,
    "lstm-large": 13_270_400,
    "lstm-2x1500": 66_034_000,
}
WORD_MODELS = ("lstm-small", "lstm-medium", "lstm-large", "lstm-2x1500")
NARROW = {
    "lstm": {"hidden": 24},
    "gpt": {"width": 20},
    "gpt-10m": {"width": 24},
    "gpt-121m": {"width": 24},
    "resnet18": {"width": 8},
    **{name: {"hidden": 24} for name in WORD_MODELS},
}
IMAGE_MODELS = ("resnet8", "resnet20", "resnet18", "vgg11", "vgg16", "resnet50", "resnet101")


def narrow(name, **shape):
    default = {"width": 8} if name in IMAGE_MODELS else {}
    return make_model(name, **(NARROW.get(name, default) | shape))


@pytest.mark.parametrize("name", MODELS)
def test_parameter_count(name):
    with torch.device("meta"):
        model = make_model(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28)])
def test_image_models_take_both_sizes(name, shape):
    model = narrow(name, in_channels=shape[0], classes=7)
    assert model(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", ["lstm", "gpt", "gpt-10m", "gpt-121m", *WORD_MODELS])
def test_language_models_see_only_the_past(name):
    model = narrow(name, vocab=50).eval()
    symbols = torch.randint(50, (2, 12))
    logits = model(symbols)
    assert logits.shape == (2, 12, 50)
    changed = symbols.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    other = model(changed)
    torch.testing.assert_close(other[:, :7], logits[:, :7])
    assert not torch.allclose(other[:, 7:], logits[:, 7:])


@pytest.mark.parametrize("name", WORD_MODELS)
def test_a_word_model_goes_on_where_it_stopped(name):
    torch.manual_seed(0)
    model = narrow(name, vocab=50).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.lstm.dropout = 0.0
    symbols = torch.randint(50, (2, 12))
    whole = model(symbols)
    assert not torch.allclose(model(symbols), whole)  # the state before it is another one
    model.restart()
    torch.testing.assert_close(model(symbols), whole)

    model.restart()
    model(symbols[:, :7])
    other = narrow(name, vocab=50)
    other.load_state_dict(model.state_dict())
    other.lstm.dropout, other.dropout.p = 0.0, 0.0
    torch.testing.assert_close(other(symbols[:, 7:]), whole[:, 7:])  # the state is in the state
    model.eval()(symbols)
    torch.testing.assert_close(model.train()(symbols[:, 7:]), whole[:, 7:])  # and evaluating keeps
    assert not any(name.startswith("_") for name, _ in model.named_buffers())
    model(symbols[:1])  # fewer rows begin anew


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient(name):
    model = narrow(name)
    inputs = torch.randn(2, 3, 32, 32) if name in IMAGE_MODELS else torch.randint(256, (2, 16))
    model(inputs).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_bad_names_and_shapes():
    with pytest.raises(ValueError, match=r"model='alexnet'.*accepted: lstm, gpt"):
        make_model("alexnet")
    with pytest.raises(ValueError, match=r"heads=3 must divide width=16"):
        make_model("gpt", width=16, heads=3)
    with pytest.raises(ValueError, match=r"sequence of 9 symbols.*<= 8"):
        make_model("gpt", context=8)(torch.zeros(1, 9, dtype=torch.int64))
