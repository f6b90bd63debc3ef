"""`attention_saveable` keeps what fused attention gives and nothing else, and its product is not repeated."""

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import memscale as ms
from tests.support.checks import bits

ROWS, HEADS, TOKENS, WIDTH = 2, 2, 16, 8


def attend(x, weight):
    q, k, v = (x @ weight).chunk(3, -1)
    return torch.tanh(F.scaled_dot_product_attention(q, k, v))


def _step(fn):
    torch.manual_seed(0)
    x = torch.randn(ROWS, HEADS, TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(WIDTH, 3 * WIDTH, requires_grad=True)
    kept = sum(each.nbytes for each in ms.saved_residuals(fn, x, weight) if each.source == "intermediate")
    with FlopCounterMode(display=False) as counter:
        out = fn(x, weight)
        out.sum().backward()
    return kept, counter.get_total_flops(), (out, x.grad, weight.grad)


def test_attention_is_kept_and_its_inputs_are_computed_again():
    how = ms.checkpoint(policy=ms.policies.attention_saveable)
    _, flops, plain = _step(attend)
    kept, again, found = _step(how(attend))
    result, logsumexp = ROWS * HEADS * TOKENS * WIDTH * 4, ROWS * HEADS * TOKENS * 4
    assert kept == result + logsumexp
    assert again - flops == 2 * ROWS * HEADS * TOKENS * WIDTH * 3 * WIDTH  # the projection
    assert bits(found) == bits(plain)


def test_it_is_written_and_read_like_any_other():
    plan = ms.Plan({"*": ms.checkpoint(policy=ms.policies.attention_saveable)})
    assert ms.Plan.from_json(plan.to_json()) == plan
    assert "checkpoint(policy=policies.attention_saveable)" in plan.to_python()


def test_what_is_drawn_after_the_forward_is_not_drawn_again_after_backward():
    """Attention without dropout draws nothing: a replay set the generator to where it was, and nobody put it back."""
    torch.manual_seed(0)
    fit = ms.checkpoint(policy=ms.policies.attention_saveable)(attend)
    for _ in range(2):  # the second call is watched in another way
        out = fit(torch.randn(1, 1, 4, 8), torch.randn(8, 24, requires_grad=True))
        torch.rand(3)
        before = torch.get_rng_state()
        out.sum().backward()
        assert torch.equal(torch.get_rng_state(), before)
