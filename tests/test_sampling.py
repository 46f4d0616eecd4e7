"""Samples: what a loop written by hand would draw."""

from dataclasses import replace

import pytest
import torch

from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.trainer.evaluation import generate
from runs import HYBRID

SHAPE = replace(HYBRID, vocab_size=61, init_std=0.3)
PROMPT = torch.tensor([3, 14, 15])


@pytest.fixture(scope="module")
def model():
    return build(SHAPE)


def by_hand(model, tokens, count, context, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens.tolist()
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([tokens[-context:]]))[0, -1]
        order = sorted(range(len(logits)), key=lambda i: -logits[i].item())[:50]
        weights = (logits[order] / 0.8).softmax(-1)
        tokens.append(order[torch.multinomial(weights, 1, generator=generator).item()])
    return tokens


# A context of 5 is left behind after two tokens, one of 100 never.
@pytest.mark.parametrize("context", [5, 100])
def test_samples_are_those_of_a_loop_by_hand(model, context):
    found = generate(model, PROMPT, 12, context, seed=4)
    assert found.tolist() == by_hand(model, PROMPT, 12, context, 4)


def test_a_vocabulary_smaller_than_top_k_is_fine():
    model = build(replace(SHAPE, vocab_size=20))
    assert len(generate(model, PROMPT, 3, 64, seed=0)) == 6


def test_nothing_but_the_seed_decides_and_nothing_else_is_disturbed(model):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = generate(model, PROMPT, 8, 64, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(8)
    assert torch.equal(first, generate(model, PROMPT, 8, 64, seed=2))
    assert not torch.equal(first, generate(model, PROMPT, 8, 64, seed=3))
    assert model.training


def test_nothing_is_compiled_for_a_sample():
    """Lengths differ from token to token: each would be compiled anew."""
    model, compiled = build(SHAPE), []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=backend)
    generate(model, PROMPT, 3, 64, seed=0)
    assert compiled == []
