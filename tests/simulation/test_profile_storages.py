"""`profile` against the allocator, to the byte: storages, aliases, subclasses, autograd, hooks and precisions."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memscale as ms
from tests.support.profiled import ROWS, Cases, Forward, mlp, train, x
from tests.support.steps import assert_exact

CASES = Cases()
case, forward_case = CASES.case, CASES.forward_case


# ------------------------------------------------------------------------------------------- storage and aliases


@case
def tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(97, 24), mlp(24, 24), nn.Linear(24, 97, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return F.cross_entropy(self.head(self.body(self.embed(ids))).flatten(0, 1), ids.flatten())

    return train(Tied(), torch.arange(90).reshape(6, 15), loss=None)


@case
def two_parameters_over_one_storage():
    flat = x(40, 24)
    model = Forward(lambda m, y: (y @ m.up) @ m.down.t())
    model.up, model.down = nn.Parameter(flat[:24]), nn.Parameter(flat[16:])
    return train(model, x(ROWS, 24))


@forward_case(lambda forward: train(Forward(forward, one=nn.Linear(48, 64)), x(ROWS, 48)))
def views_and_aliases(m, y):
    y = m.one(y)
    first, second = y.chunk(2, dim=-1)
    wide = first.unsqueeze(1).expand(-1, 5, -1)
    kept = wide.reshape(-1, first.shape[-1]) * 2  # a copy, then nothing but views
    return kept.view(5, -1).unfold(1, 3, 2).sum() + second.narrow(0, 1, 7).squeeze().diagonal().sum() + y[3, ::2].sum()


@case
def products_of_strided_matrices():
    model = Forward(lambda m, y: torch.mm(m.one(y)[:, ::2], m.wide[:, ::2]).square().mean(), one=nn.Linear(48, 512))
    model.wide = nn.Parameter(x(256, 40))
    return train(model, x(ROWS, 48))


@case
def selections_by_a_constant_mask():
    return train(
        Forward(lambda m, y: torch.combinations(m.one(y)[0]).square().mean(), one=nn.Linear(48, 300)), x(9, 48)
    )


@forward_case(lambda forward: train(Forward(forward, one=nn.Linear(48, 64).bfloat16()), x(ROWS, 48)))
def products_of_one_row_for_all_in_16_bits(m, y):
    return m.one(y.bfloat16()).sum(0).square().mean()


@forward_case(lambda forward: train(Forward(forward, one=nn.Linear(48, 64)), x(ROWS, 48)))
def sums_within_a_derivative(m, y):
    variance, mean = torch.var_mean(m.one(y).view(-1, 8, 8), 1)
    return torch.linalg.pinv(m.one(y).view(-1, 8, 8)).mean() + (variance + mean).square().mean()


@forward_case(lambda forward: train(Forward(forward, one=nn.Linear(48, 64), two=nn.Linear(64, 80)), x(ROWS, 48)))
def in_place_operations(m, y):
    y = m.one(y).add_(1).mul_(0.5)
    y[:, 3] = 0
    y[2].fill_(1.5)
    y.masked_fill_(y.detach() > 100, 0.0)
    y = F.relu_(y.clamp_(min=-4)) @ m.two.weight.t()
    return y.sigmoid_()


@forward_case(lambda forward: train(Forward(forward, net=mlp()), x(ROWS, 48)))
def out_arguments(m, y):
    with torch.no_grad():
        noise = torch.empty(0)
        torch.add(y, 1, out=noise)  # grows it
        torch.mul(noise, 2, out=noise)
    return m.net(y + noise)


@forward_case(lambda forward: train(Forward(forward, one=nn.Linear(48, 64), two=nn.Linear(64, 20)), x(ROWS, 48)))
def a_storage_that_is_freed_and_filled_again(m, y):
    hidden = m.one(y)
    scratch = hidden.detach().clone()
    scratch.untyped_storage().resize_(0)
    out = m.two(hidden.sin())
    scratch.untyped_storage().resize_(hidden.nbytes)
    scratch.copy_(hidden.detach())
    return out + m.two(scratch)


@case
def weights_gathered_and_freed_around_each_layer():
    class Gathered(nn.Module):
        """The life of a sharded weight: filled before use, freed after, filled again for backward."""

        def __init__(self):
            super().__init__()
            self.shard = nn.Parameter(x(24, 48))

        def forward(self, y):
            whole = torch.cat([self.shard, self.shard * 2])
            return F.linear(y, whole).tanh()

    return train(nn.Sequential(*[Gathered() for _ in range(4)]), x(ROWS, 48))


@forward_case(lambda forward: train(Forward(forward, net=mlp()), x(ROWS, 48)))
def slices_written_with_index_put(m, y):
    hidden = m.net(y)
    room = hidden.new_zeros(2 * ROWS, hidden.shape[1])
    room[torch.arange(ROWS)] = hidden
    room.index_add_(0, torch.tensor([1, 40]), hidden[:2])
    return room.cumsum(0).index_select(0, torch.tensor([0, 2, 4]))


# -------------------------------------------------------------------------------------------------- subclasses


class Doubled(torch.Tensor):
    """A traceable wrapper subclass: its values are twice those of the tensor that it holds."""

    @staticmethod
    def __new__(cls, half):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            half.shape,
            strides=half.stride(),
            dtype=half.dtype,
            device=half.device,
            requires_grad=half.requires_grad,
        )

    def __init__(self, half):
        self.half_ = half

    def __tensor_flatten__(self):
        return ["half_"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Doubled(inner["half_"])

    def __repr__(self):
        return "Doubled()"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def plain(value):
            return value.half_ * 2 if isinstance(value, Doubled) else value

        if func is torch.ops.aten.detach.default:
            return Doubled(args[0].half_.detach())
        if func._schema.is_mutable and isinstance(args[0], Doubled):
            values = [plain(value) for value in args]
            func(*values, **(kwargs or {}))
            args[0].half_.copy_(values[0] / 2)
            return args[0]
        return func(*torch.utils._pytree.tree_map(plain, tuple(args)), **(kwargs or {}))


@case
def subclass_parameters():
    model = mlp()
    model[0].weight = nn.Parameter(Doubled(model[0].weight.detach()))
    return train(
        model,
        x(ROWS, 48),
        functools.partial(torch.optim.SGD, lr=0.1, foreach=False),
    )


# ----------------------------------------------------------------------------------------------- autograd and hooks


@forward_case(lambda forward: train(Forward(forward, net=mlp()), x(ROWS, 48)))
def saved_tensors_on_cpu(m, y):
    with torch.autograd.graph.save_on_cpu():
        return m.net(y)


@forward_case(lambda forward: train(Forward(forward, net=mlp()), x(ROWS, 48)))
def saved_tensors_packed_by_the_user(m, y):
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.to(torch.bfloat16) if t.dtype == torch.float32 else t,
        lambda t: t.float() if t.dtype == torch.bfloat16 else t,
    ):
        return m.net(y)


@case
def hooks_on_modules():
    model = nn.Sequential(mlp(48, 48), mlp())
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda module, args, output: output + args[0])
    model[1][0].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))
    model[1].register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0].clone(),))
    return train(model, x(ROWS, 48))


@case
def hooks_on_tensors():
    def forward(m, y):
        hidden = m.one(y)
        hidden.register_hook(lambda grad: grad * 2)
        hidden.retain_grad()
        return m.two(hidden.tanh())

    model = Forward(forward, one=nn.Linear(48, 64), two=nn.Linear(64, 20))
    model.two.weight.register_hook(lambda grad: grad.clamp(-1, 1))
    return train(model, x(ROWS, 48))


@case
def optimizer_in_backward():
    model = mlp()
    optimizers = {parameter: torch.optim.Adam([parameter], foreach=False) for parameter in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def states():
        return [t for o in optimizers.values() for state in o.state.values() for t in state.values()]

    return train(model, x(ROWS, 48), None, held=states)


@forward_case(lambda forward: train(Forward(forward, net=mlp(), teacher=mlp().requires_grad_(False)), x(ROWS, 48)))
def no_grad_parts(m, y):
    with torch.no_grad():
        target = m.teacher(y)
    with torch.inference_mode():
        m.teacher(y)
    return F.mse_loss(m.net(y), target) + m.net(y).detach().sum()


@case
def frozen_parts():
    model = nn.Sequential(mlp(48, 48), mlp(48, 48), mlp())
    model[0].requires_grad_(False)
    model[1][0].requires_grad_(False)
    return train(model, x(ROWS, 48))


@case
def lora():
    class Lora(nn.Module):
        def __init__(self, base, rank=4):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Linear(base.in_features, rank, bias=False)
            self.up = nn.Linear(rank, base.out_features, bias=False)

        def forward(self, y):
            return self.base(y) + self.up(self.down(F.dropout(y, 0.1))) * 0.5

    return train(nn.Sequential(Lora(nn.Linear(48, 96)), nn.SiLU(), Lora(nn.Linear(96, 48))), x(ROWS, 48))


@forward_case(lambda forward: train(Forward(forward, net=mlp(act=nn.Tanh)), x(ROWS, 48), loss=None))
def gradient_penalty(m, y):
    y = y.detach().requires_grad_()
    out = m.net(y)
    (slope,) = torch.autograd.grad(out.sum(), y, create_graph=True)
    return out.mean() + (slope.norm(dim=1) - 1).square().mean()


@case
def an_input_that_requires_a_gradient():
    batch = x(ROWS, 48).requires_grad_()

    def loss(output, y):
        (slope,) = torch.autograd.grad(output.sum(), y, retain_graph=True)
        return output.mean() + slope.sum()

    return train(mlp(), batch, loss=loss, held=lambda: [] if batch.grad is None else [batch.grad])


@case
def custom_function_in_place():
    class Negate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.mark_dirty(y)
            return y.neg_()

        @staticmethod
        def backward(ctx, grad):
            return grad.neg()

    return train(Forward(lambda m, y: m.b(Negate.apply(m.a(y))), a=nn.Linear(48, 64), b=nn.Linear(64, 20)), x(ROWS, 48))


def _torch_checkpointed(use_reentrant):
    def forward(m, y):
        y = m.first(y)
        for block in m.blocks:
            y = torch_checkpoint(block, y, use_reentrant=use_reentrant, preserve_rng_state=False)
        return y

    return train(
        Forward(forward, first=nn.Linear(48, 48), blocks=nn.ModuleList([mlp(48, 48) for _ in range(4)])), x(ROWS, 48)
    )


@case
def torch_checkpoint_reentrant():
    return _torch_checkpointed(True)


@case
def selective_checkpoint_of_torch():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def forward(m, y):
        for block in m.blocks:
            y = torch_checkpoint(block, y, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        return y

    return train(Forward(forward, blocks=nn.ModuleList([mlp(48, 48) for _ in range(4)])), x(ROWS, 48))


@forward_case(lambda forward: train(Forward(forward, one=nn.Linear(48, 64), two=nn.Linear(64, 64)), x(333, 48)))
def gradient_that_sums_many(m, y):
    hidden = m.one(y)
    return hidden.sin() + hidden.cos() * hidden + m.two(hidden) + hidden.exp() + hidden


@forward_case(lambda forward: train(Forward(forward, qkv=nn.Linear(48, 192)), x(65, 48)))
def gradients_of_views_that_sum(m, y):
    q, k, v = m.qkv(y).chunk(3, -1)
    return (q @ k.t()).softmax(-1) @ v + q + v.sum(0)


# --------------------------------------------------------------------------------------------------- precisions


@forward_case(
    lambda forward: train(Forward(forward, net=nn.Sequential(mlp(48, 48), nn.LayerNorm(48), mlp())), x(ROWS, 48))
)
def autocast(m, y):
    with torch.autocast("cpu", torch.bfloat16):
        return m.net(y).float()


@forward_case(lambda forward: train(Forward(forward, net=mlp(48, 48)), x(ROWS, 48)))
def autocast_with_weights_used_twice(m, y):
    with torch.autocast("cpu", torch.bfloat16):
        return m.net(m.net(y)).float().softmax(-1)


@case
def bfloat16():
    return train(mlp().to(torch.bfloat16), x(ROWS, 48, dtype=torch.bfloat16))


@case
def complex64():
    model = Forward(lambda m, y: (torch.fft.ifft(torch.fft.fft(y) * m.weight)).real)
    model.weight = nn.Parameter(x(48, dtype=torch.complex64))
    return train(model, x(ROWS, 48))


@forward_case(lambda forward: train(Forward(forward, one=nn.Linear(48, 64)), x(ROWS, 48)))
def mixed_precision_by_hand(m, y):
    return F.linear(y.bfloat16(), m.one.weight.bfloat16()).float().log_softmax(-1)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_a_simulated_step_takes_what_a_real_one_takes(make):
    assert_exact(make())


def test_what_was_there_before_lies_in_the_order_in_which_it_was_moved_there():
    """`Module.to` moves children first; a cuBLAS workspace comes when there is room for the first product's result."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(300))
            self.inner = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4))

        def forward(self, x):
            return self.inner(x) * self.scale.sum()

    profiler = ms.MemoryProfiler(Outer(), loss=lambda y, _: y.sum(), hardware="h100")
    records = profiler.simulated(torch.ones(2, 4)).storages
    assert [record.path for record in records[:4]] == ["inner.0.weight", "inner.1.weight", "inner.1.bias", "scale"]
    product = next(at for at, record in enumerate(records) if record.category == "workspace")
    assert (records[product - 1].shape, records[product].path) == ((2, 8), "cuBLAS")


class Caching(nn.Linear):
    """Has what its last step made of a weight as an attribute, as the hook of `torch.nn.utils.weight_norm` has."""

    keeps = False

    def forward(self, x):
        if self.keeps:
            self.earlier = [self.made]
        self.made = self.weight * 2
        return x @ self.made


@pytest.mark.parametrize("keeps", [False, True])
def test_an_attribute_that_the_step_replaces_goes(keeps):
    def peak(made):
        model = Caching(64, 64)
        model.made, model.keeps = made, keeps
        found = ms.profile(model, torch.ones(4, 64), loss=lambda y, _: y.sum())
        assert model.made is made
        return found.peak_bytes

    # In a list of the step's own it may be held by anything: the caller's counts as long as the profile lasts.
    assert peak(torch.ones(1 << 16)) - peak(torch.ones(64, 64)) == keeps * ((1 << 16) - 64 * 64) * 4
