"""`profile` against the allocator, to the byte: what a simulated step says is what a real one takes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memscale as ms
from memscale.runtime import Runtime, home_of
from memscale.simulation.measured.allocator_trace import measure
from tests.support.steps import NUMBERS_BYTES, Training, assert_equal_bytes, assert_exact, mean, real_peaks

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


ROWS = 333  # many more than there are features, so that the peak is among the activations


def x(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def mlp(width=48, out=20, act=nn.GELU):
    return nn.Sequential(nn.Linear(width, 3 * width), act(), nn.Linear(3 * width, out))


def train(model, batch, optimizer=adamw, loss=mean, **options):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Training(model, batch, optimizer and optimizer(parameters), loss, **options)


class Forward(nn.Module):
    """A model whose forward is a function of it and its arguments; `parts` are its children."""

    def __init__(self, forward, **parts):
        super().__init__()
        self._call = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self._call(self, *args, **kwargs)


CASES = {}


def case(make):
    CASES[make.__name__.strip("_")] = make
    return make


# ------------------------------------------------------------------------------------------- storage and aliases


@case
def plain_mlp():
    return train(mlp(), x(ROWS, 48))


@case
def no_optimizer():
    return train(mlp(), x(ROWS, 48), None)


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


@case
def views_and_aliases():
    def forward(m, y):
        y = m.one(y)
        first, second = y.chunk(2, dim=-1)
        wide = first.unsqueeze(1).expand(-1, 5, -1)
        kept = wide.reshape(-1, first.shape[-1]) * 2  # a copy, then nothing but views
        return (
            kept.view(5, -1).unfold(1, 3, 2).sum() + second.narrow(0, 1, 7).squeeze().diagonal().sum() + y[3, ::2].sum()
        )

    return train(Forward(forward, one=nn.Linear(48, 64)), x(ROWS, 48))


@case
def expanded_and_strided_inputs():
    return train(mlp(), x(1, 48).expand(ROWS, 48))


@case
def batch_of_overlapping_views():
    data = x(2 * ROWS, 48)
    return train(Forward(lambda m, a, b: m.net(a) + m.net(b), net=mlp()), (data[:ROWS], data[20 : ROWS + 20]))


@case
def in_place_operations():
    def forward(m, y):
        y = m.one(y).add_(1).mul_(0.5)
        y[:, 3] = 0
        y[2].fill_(1.5)
        y.masked_fill_(y.detach() > 100, 0.0)
        y = F.relu_(y.clamp_(min=-4)) @ m.two.weight.t()
        return y.sigmoid_()

    return train(Forward(forward, one=nn.Linear(48, 64), two=nn.Linear(64, 80)), x(ROWS, 48))


@case
def out_arguments():
    def forward(m, y):
        with torch.no_grad():
            noise = torch.empty(0)
            torch.add(y, 1, out=noise)  # grows it
            torch.mul(noise, 2, out=noise)
        return m.net(y + noise)

    return train(Forward(forward, net=mlp()), x(ROWS, 48))


@case
def a_tensor_that_is_resized():
    def forward(m, y):
        with torch.no_grad():
            room = torch.empty(10)
            room.resize_(5000)
            room.resize_(2 * ROWS, 48)
            room.zero_()
        return m.net(y + room[:ROWS])

    return train(Forward(forward, net=mlp()), x(ROWS, 48))


@case
def a_storage_that_is_freed_and_filled_again():
    def forward(m, y):
        hidden = m.one(y)
        scratch = hidden.detach().clone()
        scratch.untyped_storage().resize_(0)
        out = m.two(hidden.sin())
        scratch.untyped_storage().resize_(hidden.nbytes)
        scratch.copy_(hidden.detach())
        return out + m.two(scratch)

    return train(Forward(forward, one=nn.Linear(48, 64), two=nn.Linear(64, 20)), x(ROWS, 48))


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


@case
def slices_written_with_index_put():
    def forward(m, y):
        hidden = m.net(y)
        room = hidden.new_zeros(2 * ROWS, hidden.shape[1])
        room[torch.arange(ROWS)] = hidden
        room.index_add_(0, torch.tensor([1, 40]), hidden[:2])
        return room.cumsum(0).index_select(0, torch.tensor([0, 2, 4]))

    return train(Forward(forward, net=mlp()), x(ROWS, 48))


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


@case
def frozen_subclass_weights():
    model = mlp()
    model[0].weight = nn.Parameter(Doubled(model[0].weight.detach()), requires_grad=False)
    return train(model, x(ROWS, 48))


@case
def subclass_by_torch_function():
    class Named(torch.Tensor):
        pass

    return train(mlp(), x(ROWS, 48).as_subclass(Named))


# ----------------------------------------------------------------------------------------------- autograd and hooks


@case
def saved_tensors_on_cpu():
    def forward(m, y):
        with torch.autograd.graph.save_on_cpu():
            return m.net(y)

    return train(Forward(forward, net=mlp()), x(ROWS, 48))


@case
def saved_tensors_packed_by_the_user():
    def forward(m, y):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.to(torch.bfloat16) if t.dtype == torch.float32 else t,
            lambda t: t.float() if t.dtype == torch.bfloat16 else t,
        ):
            return m.net(y)

    return train(Forward(forward, net=mlp()), x(ROWS, 48))


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


@case
def no_grad_parts():
    def forward(m, y):
        with torch.no_grad():
            target = m.teacher(y)
        with torch.inference_mode():
            m.teacher(y)
        return F.mse_loss(m.net(y), target) + m.net(y).detach().sum()

    return train(Forward(forward, net=mlp(), teacher=mlp().requires_grad_(False)), x(ROWS, 48))


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


@case
def gradient_penalty():
    def forward(m, y):
        y = y.detach().requires_grad_()
        out = m.net(y)
        (slope,) = torch.autograd.grad(out.sum(), y, create_graph=True)
        return out.mean() + (slope.norm(dim=1) - 1).square().mean()

    return train(Forward(forward, net=mlp(act=nn.Tanh)), x(ROWS, 48), loss=None)


@case
def an_input_that_requires_a_gradient():
    batch = x(ROWS, 48).requires_grad_()

    def loss(output, y):
        (slope,) = torch.autograd.grad(output.sum(), y, retain_graph=True)
        return output.mean() + slope.sum()

    return train(mlp(), batch, loss=loss, held=lambda: [] if batch.grad is None else [batch.grad])


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        square = y * y
        ctx.save_for_backward(y, square)
        ctx.extra = torch.ones_like(y)
        return square * y

    @staticmethod
    def backward(ctx, grad):
        _, square = ctx.saved_tensors
        return grad * square * 3 * ctx.extra


@case
def custom_function():
    return train(Forward(lambda m, y: m.b(Cube.apply(m.a(y))), a=nn.Linear(48, 64), b=nn.Linear(64, 20)), x(ROWS, 48))


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
def torch_checkpoint_without_reentry():
    return _torch_checkpointed(False)


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


@case
def gradient_that_sums_many():
    def forward(m, y):
        hidden = m.one(y)
        return hidden.sin() + hidden.cos() * hidden + m.two(hidden) + hidden.exp() + hidden

    return train(Forward(forward, one=nn.Linear(48, 64), two=nn.Linear(64, 64)), x(333, 48))


@case
def gradients_of_views_that_sum():
    def forward(m, y):
        q, k, v = m.qkv(y).chunk(3, -1)
        return (q @ k.t()).softmax(-1) @ v + q + v.sum(0)

    return train(Forward(forward, qkv=nn.Linear(48, 192)), x(65, 48))


# --------------------------------------------------------------------------------------------------- precisions


@case
def autocast():
    def forward(m, y):
        with torch.autocast("cpu", torch.bfloat16):
            return m.net(y).float()

    return train(Forward(forward, net=nn.Sequential(mlp(48, 48), nn.LayerNorm(48), mlp())), x(ROWS, 48))


@case
def autocast_with_weights_used_twice():
    def forward(m, y):
        with torch.autocast("cpu", torch.bfloat16):
            return m.net(m.net(y)).float().softmax(-1)

    return train(Forward(forward, net=mlp(48, 48)), x(ROWS, 48))


@case
def bfloat16():
    return train(mlp().to(torch.bfloat16), x(ROWS, 48, dtype=torch.bfloat16))


@case
def float16():
    return train(mlp().half(), x(ROWS, 48, dtype=torch.float16))


@case
def float64():
    return train(mlp().double(), x(ROWS, 48, dtype=torch.float64))


@case
def complex64():
    model = Forward(lambda m, y: (torch.fft.ifft(torch.fft.fft(y) * m.weight)).real)
    model.weight = nn.Parameter(x(48, dtype=torch.complex64))
    return train(model, x(ROWS, 48))


@case
def mixed_precision_by_hand():
    def forward(m, y):
        return F.linear(y.bfloat16(), m.one.weight.bfloat16()).float().log_softmax(-1)

    return train(Forward(forward, one=nn.Linear(48, 64)), x(ROWS, 48))


# ----------------------------------------------------------------------------------------- shapes from known values


@case
def lengths_that_are_known():
    def forward(m, tokens, lengths):
        hidden = m.embed(tokens)
        rows = [m.net(hidden[i, : int(n)]).sum(0) for i, n in enumerate(lengths)]
        return torch.stack(rows)

    return train(
        Forward(forward, embed=nn.Embedding(360, 48), net=mlp()),
        (torch.arange(360).reshape(8, 45), torch.tensor([3, 45, 1, 5, 30, 2, 17, 11])),
    )


@case
def a_mask_that_selects():
    def forward(m, tokens, mask):
        return m.net(m.embed(tokens)[mask])

    mask = torch.arange(360).reshape(8, 45) % 3 > 0
    return train(Forward(forward, embed=nn.Embedding(360, 48), net=mlp()), (torch.arange(360).reshape(8, 45), mask))


@case
def tokens_that_are_found():
    def forward(m, tokens):
        where = (tokens == 7).nonzero(as_tuple=True)
        ends = tokens.eq(35).int().argmax(-1)
        hidden = m.embed(tokens)
        return (
            m.net(hidden[where]).sum() + m.net(hidden[torch.arange(8), ends]).sum() + m.net(hidden[tokens.ne(0)]).mean()
        )

    return train(Forward(forward, embed=nn.Embedding(360, 48), net=mlp()), torch.arange(360).reshape(8, 45))


@case
def unique_and_repeat_interleave():
    def forward(m, tokens, counts):
        kinds, back = tokens.unique(return_inverse=True)
        hidden = m.net(m.embed(kinds))[back]
        return hidden.repeat_interleave(counts, dim=0)

    return train(
        Forward(forward, embed=nn.Embedding(360, 48), net=mlp()), (torch.arange(300) % 47, torch.arange(300) % 4)
    )


@case
def a_packed_batch():
    def forward(m, tokens, offsets):
        parts = m.embed(tokens).tensor_split(offsets[1:-1])
        return torch.stack([m.net(part).mean(0) for part in parts])

    return train(
        Forward(forward, embed=nn.Embedding(360, 48), net=mlp()), (torch.arange(300), torch.tensor([0, 40, 190, 300]))
    )


# ------------------------------------------------------------------------------------------------- loops and wholes


@case
def gradient_accumulation():
    return train(nn.Sequential(mlp(48, 48), mlp()), x(ROWS, 48), accumulate=3)


@case
def gradient_accumulation_of_a_tied_model():
    model = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48))
    model[2].weight = model[0].weight
    return train(model, x(ROWS, 48), accumulate=2)


@case
def module_used_twice():
    net = mlp(48, 48)
    return train(nn.Sequential(net, nn.Tanh(), net), x(ROWS, 48))


@case
def containers_of_modules():
    def forward(m, y):
        for part in m.many:
            y = part(y)
        return {"out": m.by_name["head"](y) * m.scales[1], "unused": y}

    model = Forward(
        forward,
        many=nn.ModuleList([mlp(48, 48) for _ in range(3)]),
        by_name=nn.ModuleDict({"head": nn.Linear(48, 20), "other": nn.Linear(48, 20)}),
    )
    model.scales = nn.ParameterList([nn.Parameter(x(20)) for _ in range(2)])
    return train(model, x(ROWS, 48), loss=lambda out, _: out["out"].mean())


@case
def transformer():
    model = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
    return train(model, (x(3, 9, 32), x(3, 7, 32)))


@case
def transformer_with_masks():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    mask = torch.arange(9) > torch.tensor([[8], [5], [7]])
    model = Forward(
        lambda m, y: m.net(
            y, mask=nn.Transformer.generate_square_subsequent_mask(9), src_key_padding_mask=mask.float()
        ),
        net=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
    )
    return train(model, x(3, 9, 32), held=lambda: [mask])


@case
def attention():
    def forward(m, y):
        q, k, v = m.qkv(y).view(2, 17, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    return train(Forward(forward, qkv=nn.Linear(64, 192), out=nn.Linear(64, 64)), x(2, 17, 64))


@case
def norms_and_dropout():
    model = nn.Sequential(
        nn.LayerNorm(48),
        nn.Linear(48, 64),
        nn.Dropout(0.2),
        nn.RMSNorm(64),
        nn.Unflatten(1, (8, 8)),
        nn.GroupNorm(4, 8),
        nn.Flatten(),
        nn.Linear(64, 20),
        nn.LogSoftmax(-1),
    )
    return train(model, x(ROWS, 48))


@case
def batch_norm():
    return train(
        nn.Sequential(nn.Linear(48, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 5)), x(ROWS, 48)
    )


@case
def losses_of_many_kinds():
    def loss(output, batch):
        labels = torch.arange(ROWS) % 20
        return (
            F.cross_entropy(output, labels, label_smoothing=0.1)
            + F.nll_loss(output.log_softmax(-1), labels)
            + F.mse_loss(output, output.detach() + 1)
            + F.binary_cross_entropy_with_logits(output, output.detach().sigmoid())
            + F.smooth_l1_loss(output, torch.zeros_like(output))
            + F.kl_div(output.log_softmax(-1), output.detach().softmax(-1), reduction="batchmean")
        )

    return train(mlp(), x(ROWS, 48), loss=loss)


@case
def functional_call():
    def forward(m, y):
        scaled = {name: parameter * 0.5 for name, parameter in m.net.named_parameters()}
        return torch.func.functional_call(m.net, scaled, (y,))

    return train(Forward(forward, net=mlp()), x(ROWS, 48))


@case
def parametrized():
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.orthogonal(model[2], orthogonal_map="cayley")
    return train(model, x(ROWS, 48))


@case
def spectral_norm():
    model = mlp()
    nn.utils.parametrizations.spectral_norm(model[0])
    return train(model, x(ROWS, 48))


@case
def compiled():
    return train(torch.compile(mlp(), backend="eager"), x(ROWS, 48))


@case
def vmapped_ensemble():
    def forward(m, y):
        weights = {name: value.expand(4, *value.shape) for name, value in m.net.named_parameters()}
        return torch.func.vmap(lambda w: torch.func.functional_call(m.net, w, (y,)))(weights)

    return train(Forward(forward, net=mlp()), x(ROWS, 48))


@case
def per_sample_gradients():
    def forward(m, y):
        weights = dict(m.net.named_parameters())

        def one(w, row):
            return torch.func.functional_call(m.net, w, (row,)).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(weights, y)
        return sum(gradient.square().sum() for gradient in per_sample.values())

    return train(Forward(forward, net=mlp(16, 5)), x(7, 16), loss=None)


@case
def recurrent_cell():
    def forward(m, y):
        state = None
        for at in range(y.shape[1]):
            state = m.cell(y[:, at], state)
        return state[0]

    return train(Forward(forward, cell=nn.LSTMCell(16, 24)), x(5, 6, 16))


@case
def einsum_and_friends():
    def forward(m, y):
        y = torch.einsum("bi,ij->bj", y, m.one.weight.t())
        y = torch.cat([y, y.roll(1, 0), y.flip(1)], dim=1).view(ROWS, 3, -1)
        y = torch.stack(y.unbind(1), 0).permute(1, 0, 2).contiguous()
        y = torch.where(y > 0, y, 0.1 * y).pow(2).cumsum(1)
        return y.square().sum(-1).max() + y.std() + F.pad(y, (1, 2)).tril().norm()

    return train(Forward(forward, one=nn.Linear(48, 64)), x(ROWS, 48), loss=None)


def _ending_in(function, held=tuple):
    return train(Forward(lambda m, y: function(m.one(y)), one=nn.Linear(48, 64)), x(ROWS, 48), None, None, held=held)


@case
def product_with_a_mask_of_flags():
    mask = x(ROWS, 64) > 0
    return _ending_in(lambda y: (y * mask).mean(), lambda: [mask])


@case
def product_with_integers():
    counts = torch.arange(ROWS * 64).view(ROWS, 64)
    return _ending_in(lambda y: (y * counts).mean(), lambda: [counts])


@case
def mean_of_a_linear_layer():
    return _ending_in(torch.mean)


@case
def sum_of_a_linear_layer():
    return _ending_in(torch.sum)


@case
def squared_error():
    return _ending_in(lambda y: F.mse_loss(y.sin(), torch.zeros_like(y)) + y.cos().exp().sum())


@case
def an_embedding_of_bags():
    def forward(m, tokens, offsets):
        return m.head(m.bag(tokens, offsets))

    return train(
        Forward(forward, bag=nn.EmbeddingBag(60, 24), head=nn.Linear(24, 5)),
        (torch.arange(50), torch.tensor([0, 7, 30])),
    )


@case
def gradient_through_sort_and_gather():
    def forward(m, y):
        y, order = m.one(y).sort(-1)
        return y.gather(-1, order) * y.scatter(-1, order, 1.0) + y.topk(5).values.sum()

    return train(Forward(forward, one=nn.Linear(48, 64)), x(ROWS, 48))


# ------------------------------------------------------------------------------------------------------ transforms


def _blocks():
    return nn.Sequential(*[mlp(48, 48) for _ in range(5)])


@case
def plan_checkpoint():
    return train(_blocks(), x(ROWS, 48), plan={"*": ms.checkpoint()})


@case
def plan_checkpoint_with_a_policy():
    return train(_blocks(), x(ROWS, 48), plan={"*": ms.checkpoint(policy=ms.policies.dots_saveable)})


@case
def plan_nested_checkpoints():
    model = nn.Sequential(_blocks(), _blocks())
    return train(model, x(ROWS, 48), plan={"*": ms.checkpoint(), "*.*": ms.checkpoint()})


@case
def plan_tile():
    return train(_blocks(), x(ROWS, 48), plan={"*": ms.tile(chunks=3)})


@case
def plan_tiled_head():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(211, 24), mlp(24, 24), nn.Linear(24, 211, bias=False)

        def forward(self, ids):
            return F.cross_entropy(self.head(self.body(self.embed(ids))).flatten(0, 1), ids.flatten())

    training = train(Language(), torch.arange(90).reshape(6, 15), loss=None, plan={"head": ms.tile(chunks=3)})
    return dataclasses.replace(training, random_states=1)


SELECTIONS = {
    "max": lambda y: y.max(-1)[0],
    "median": lambda y: y.median(-1)[0],
    "topk": lambda y: y.topk(4)[0],
    "gather": lambda y: y.gather(-1, y.argsort(-1)[:, :3]),
}


@pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS)
def test_the_backward_of_a_selection_scatters_in_place(select):
    assert_exact(train(Forward(lambda m, y: select(m.one(y)), one=nn.Linear(48, 96)), x(ROWS, 48)))


def test_attention_on_strided_heads():
    def forward(m, y):
        query, key, value = m.one(y).reshape(4, 33, 3, 2, 24).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value)

    assert_exact(train(Forward(forward, one=nn.Linear(48, 144)), x(4, 33, 48)))


def test_a_model_that_decides_by_a_draw_says_so():
    def forward(m, y):
        return m.one(y) if torch.rand([]) < 0.5 else m.one(y).exp()

    profile = ms.profile(Forward(forward, one=nn.Linear(8, 8)), x(4, 8), loss=mean)
    assert any("one draw was taken" in note for note in profile.notes)


def train_offloaded(how):
    # With a depth of one there is nothing to measure: more is taken where copies are slow, as the profile assumes.
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=1))
    return train(ms.transform(_blocks(), {"*": how}, runtime=runtime), x(ROWS, 48))


@case
def plan_offload():
    return train_offloaded(ms.offload())


STREAMED = ms.offload(what="params")


@pytest.mark.parametrize(
    "how", [STREAMED, ms.compose(ms.checkpoint(), STREAMED), ms.compose(STREAMED, ms.checkpoint())]
)
def test_streamed_parameters(how):
    training = train_offloaded(how)
    profile = training.profile()
    for _ in range(3):  # the first one sends the parameters home
        training.step()
        training.optimizer.zero_grad()
    steady = measure(lambda: (training.step(), training.optimizer.zero_grad()))
    resident_bytes = training.batch.nbytes + sum(
        tensor.nbytes for state in training.optimizer.state.values() for tensor in state.values()
    )
    assert all(home_of(parameter) is not None for parameter in training.model.parameters())
    assert abs(profile.peak_bytes - resident_bytes - steady.growth_bytes) <= NUMBERS_BYTES


def test_offload_around_checkpoint():
    training = train_offloaded(ms.compose(ms.offload(), ms.checkpoint()))
    profile = training.profile()
    # Which input of the first step moves in time depends on what the runtime learns in it.
    _, steady_bytes = real_peaks(training.step, training.model, training.optimizer, training.batch)
    assert profile.method == "static"
    assert abs(profile.peak_bytes - steady_bytes) <= NUMBERS_BYTES


def test_what_is_offloaded_is_counted_on_its_tier():
    plan = {"*": ms.compose(ms.offload(min_bytes=0), ms.checkpoint())}
    model, batch = _blocks(), x(ROWS, 48)
    profile = ms.profile(model, batch, loss=mean, plan=plan)
    # The first block's input is the caller's, and the last one's is asked for at once: both stay.
    inputs = sum(1 for _ in model.children()) - 2
    assert profile.by_tier == {"disk": inputs * batch.nbytes}
    assert ms.profile(model, batch, loss=mean).by_tier == {}
    assert set(ms.profile(model, batch, loss=mean, plan=plan, hardware="h100").by_tier) == {"pinned"}


@case
def plan_cast():
    return train(_blocks(), x(ROWS, 48), plan={"*": ms.cast()})


@case
def plan_composed():
    plan = {"*": ms.compose(ms.checkpoint(), ms.tile(chunks=4)), "2": ms.cast()}
    return train(_blocks(), x(ROWS, 48), plan=plan)


@case
def already_transformed():
    return train(
        ms.transform(_blocks(), {"1": ms.checkpoint(), "3": ms.compose(ms.checkpoint(), ms.tile(chunks=2))}),
        x(ROWS, 48),
    )


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_a_simulated_step_takes_what_a_real_one_takes(make):
    assert_exact(make())


# ------------------------------------------------------------------------------------------------------ optimizers


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": torch.optim.Adam,
    "adam amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "adamw foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "adamw fused": functools.partial(torch.optim.AdamW, fused=True),
    "adamw for-loop": functools.partial(torch.optim.AdamW, foreach=False, maximize=True),
    "sgd fused": functools.partial(torch.optim.SGD, momentum=0.9, fused=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    "adagrad": torch.optim.Adagrad,
    "adagrad fused": functools.partial(torch.optim.Adagrad, fused=True),
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "differentiable off, capturable off, weight decay": functools.partial(torch.optim.Adam, weight_decay=0.1, eps=1e-6),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizers(optimizer):
    assert_exact(train(mlp(144, 80), x(9, 144), optimizer))


def test_muon():
    model = nn.Sequential(nn.Linear(48, 64, bias=False), nn.Linear(64, 80, bias=False))
    assert_exact(train(model, x(9, 48), functools.partial(torch.optim.Muon, lr=0.1)))


def test_an_optimizer_that_has_stepped():
    training = train(mlp(), x(9, 48))
    training.step()
    profile = assert_exact(training)
    assert profile.first_step_peak_bytes == profile.peak_bytes


def test_param_groups_and_a_part_of_the_parameters():
    model = mlp(48, 48)
    groups = [{"params": model[0].weight, "lr": 0.1, "foreach": True}, {"params": [model[2].weight, model[2].bias]}]
    assert_exact(Training(model, x(9, 48), torch.optim.AdamW(groups), mean))


def test_sparse_gradients_are_measured():
    model = nn.Sequential(nn.Embedding(400, 48, sparse=True), nn.Linear(48, 20))
    model[1].requires_grad_(False)
    training = train(model, torch.arange(30), torch.optim.SparseAdam)
    profile = training.profile()
    assert profile.method == "empirical"
    assert "sparse" in profile.notes[0]
    assert_equal_bytes(profile, *real_peaks(training.step, model, training.optimizer, training.batch))


def test_data_of_a_parameter_that_is_replaced():
    def forward(m, y):
        m.one.weight.data = m.one.weight.data * 1.0
        return m.one(y)

    training = train(Forward(forward, one=nn.Linear(48, 64)), x(ROWS, 48), torch.optim.SGD)
    training.model(training.batch)  # the allocator does not report the release of what a recording found
    weight_bytes = training.model.one.weight.nbytes
    profile = training.profile()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, steady = real_peaks(training.step, training.model, training.optimizer, training.batch)
    # It does report the release if an earlier recording saw an allocation at that address.
    lost = weight_bytes if any(f"freed {weight_bytes} bytes" in str(warning.message) for warning in caught) else 0
    assert abs(profile.peak_bytes - (steady - lost)) <= NUMBERS_BYTES
    # An assignment is no operator: that the former weight is gone shows only when the first step is over.
    assert 0 <= profile.first_step_peak_bytes - (first - lost) <= weight_bytes + NUMBERS_BYTES


# -------------------------------------------------------------------------------------------------- the user's own loop


def assert_step_exact(step, model, optimizer=None, batch=None, held=tuple):
    profile = ms.profile(step)
    assert_equal_bytes(profile, *real_peaks(step, model, optimizer, batch, held))
    assert profile.method == "static", profile.notes
    return profile


def test_a_step_function_with_a_schedule_a_scaler_and_clipping():
    model, batch = mlp(48, 48), x(ROWS, 48)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10)
    scaler = torch.amp.GradScaler("cpu")

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()

    assert_step_exact(step, model, optimizer, batch)


def test_what_comes_after_backward_is_part_of_the_update():
    model = mlp()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")

    def step():
        for part in torch.ones(2, 9, 48):
            scaler.scale(mean(model(part / 2), None)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)
        optimizer.zero_grad()

    assert [name for name, _ in ms.profile(step).phases] == [*["forward", "backward"] * 2, "optimizer"]


def test_forwards_without_modules_are_forwards():
    weight = torch.ones(48, 48, requires_grad=True)

    def step():
        for part in torch.ones(2, 9, 48):
            (part @ weight).square().mean().backward()
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.1)
        weight.grad = None

    assert [name for name, _ in ms.profile(step).phases] == [*["forward", "backward"] * 2, "optimizer"]


def test_clipping_in_the_middle_of_a_step_is_not_a_forward():
    first, second = mlp(), mlp()

    def step():
        for model in (first, second):
            mean(model(torch.ones(9, 48)), None).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    assert [name for name, _ in ms.profile(step).phases] == ["forward", "backward", "optimizer"] * 2


def test_gradients_that_stay_allocated():
    model, batch = mlp(48, 48), x(9, 48)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        optimizer.step()

    profile = assert_step_exact(step, model, optimizer, batch)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert profile.by_category["gradient"] == weights


def test_an_average_of_the_weights():
    model, batch = mlp(48, 48), x(9, 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    by_hand = copy.deepcopy(model).requires_grad_(False)

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            for mine, theirs in zip(by_hand.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    both = nn.ModuleList([model, average, by_hand])
    assert_step_exact(step, both, optimizer, batch)
    assert int(average.n_averaged) == 3


def test_two_models_that_train_against_each_other():
    maker, judge, noise, truth = mlp(16, 48), mlp(48, 80), x(ROWS, 16), x(ROWS, 48)
    optimizers = torch.optim.Adam(maker.parameters()), torch.optim.RMSprop(judge.parameters())

    def step():
        made = maker(noise)
        (judge(made.detach()).mean() - judge(truth).mean()).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        (-judge(made).mean()).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        judge.zero_grad()

    def states():
        return [t for optimizer in optimizers for state in optimizer.state.values() for t in state.values()]

    profile = assert_step_exact(step, nn.ModuleList([maker, judge]), None, [noise, truth], states)
    assert {path.split(".")[0] for path in profile.by_module} >= {"Sequential"}


class Trainer:
    def __init__(self):
        self.model, self.batch, self.steps, self.losses = mlp(48, 48), x(ROWS, 48), 0, []
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def train(self):
        self.steps += 1
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __call__(self):
        self.train()


def test_a_bound_method_and_a_callable_object():
    for step in (Trainer().train, Trainer()):
        trainer = getattr(step, "__self__", step)
        assert_step_exact(step, trainer.model, trainer.optimizer, trainer.batch)
        assert trainer.steps == 3


def test_a_partial_and_globals():
    trainer = Trainer()
    assert_step_exact(functools.partial(Trainer.train, trainer), trainer.model, trainer.optimizer, trainer.batch)
    global _trainer
    _trainer = trainer = Trainer()

    def step():
        _trainer.train()

    assert_step_exact(step, trainer.model, trainer.optimizer, trainer.batch)


def test_a_loss_that_is_logged_with_item():
    trainer = Trainer()

    def step():
        loss = trainer.model(trainer.batch).square().mean()
        loss.backward()
        trainer.losses.append(loss.item())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    profile = assert_step_exact(step, trainer.model, trainer.optimizer, trainer.batch)
    assert len(trainer.losses) == 3
    assert any("without overflow" in note for note in profile.notes)


# ------------------------------------------------------------------------------------------------ routing by numbers


class Experts(nn.Module):
    """A mixture whose tokens go to the best experts; `how` is the way in which they are picked out."""

    def __init__(self, how, experts=4, width=48):
        super().__init__()
        self.how, self.gate = how, nn.Linear(width, experts)
        self.experts = nn.ModuleList([mlp(width, width) for _ in range(experts)])

    def forward(self, y):
        weights, chosen = self.gate(y).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(y)
        hits = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            if self.how == "where":
                slot, token = torch.where(hits[number])
            elif self.how == "nonzero":
                token, slot = (chosen == number).nonzero(as_tuple=True)
            else:
                token, slot = (chosen == number).nonzero().t()
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(y[token]) * weights[token, slot, None])
        return out


@pytest.mark.parametrize("how", ["where", "nonzero", "rows"])
def test_a_mixture_is_routed_at_random_and_says_so(how):
    model = Experts(how)
    training = train(model, x(ROWS, 48))
    profile = training.profile()
    assert profile.method == "static"
    assert any("random ones were assumed" in note for note in profile.notes), profile.notes
    _, steady = real_peaks(training.step, model, training.optimizer, training.batch)
    assert abs(profile.peak_bytes - steady) < 0.1 * steady  # the routes differ, their number does not


def test_a_mixture_with_known_routes_is_exact():
    routes = torch.arange(ROWS) % 3

    def forward(m, y):
        out = torch.zeros_like(y)
        for number, expert in enumerate(m.experts):
            token = (routes == number).nonzero().squeeze(1)
            out = out.index_add(0, token, expert(y[token]))
        return out

    model = Forward(forward, experts=nn.ModuleList([mlp(48, 48) for _ in range(3)]))
    profile = assert_exact(train(model, x(ROWS, 48), held=lambda: [routes]))
    assert profile.notes == ()


# ------------------------------------------------------------------------------------------------------ lazy caches


class Rotary(nn.Module):
    """Makes a table at the first call and keeps it, in one of the places where models do that."""

    _shared: ClassVar[dict] = {}

    def __init__(self, where):
        super().__init__()
        self.where, self.net, self.table, self.tables, self.memo = where, mlp(48, 48), None, {}, []
        self.register_buffer("cached", None, persistent=False)

    def make(self):
        return torch.outer(torch.arange(ROWS).float(), torch.arange(48).float() / 48).cos()

    def look_up(self):
        if self.where == "attribute":
            self.table = self.make() if self.table is None else self.table
            return self.table
        if self.where == "buffer":
            self.cached = self.make() if self.cached is None else self.cached
            return self.cached
        if self.where == "list":
            self.memo or self.memo.append(self.make())
            return self.memo[0]
        if self.where == "class attribute":
            return type(self)._shared.setdefault("table", self.make())
        if self.where == "lru_cache":
            return _table(ROWS)
        if self.where == "lru_cache of a method":
            return self.cached_method()
        if self.where == "global":
            return _TABLES.setdefault(ROWS, self.make())
        return self.tables.setdefault(ROWS, self.make())

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def cached_method(self):
        return self.make()

    def forward(self, y):
        return self.net(y) * self.look_up()


_TABLES: dict = {}


@functools.lru_cache
def _table(rows):
    return torch.outer(torch.arange(rows).float(), torch.arange(48).float() / 48).cos()


PLACES = (
    "attribute", "buffer", "list", "dictionary", "class attribute", "global", "lru_cache", "lru_cache of a method",
)  # fmt: skip


@pytest.mark.parametrize("where", PLACES)
def test_a_table_that_is_made_at_the_first_call(where):
    _table.cache_clear()
    _TABLES.clear()
    Rotary._shared.clear()
    model = Rotary(where)
    reference = copy.deepcopy(model)
    batch = x(ROWS, 48)
    profile = ms.profile(model, batch, optimizer=torch.optim.SGD(model.parameters()), loss=mean)
    table = ROWS * 48 * 4
    assert profile.method == "static"
    assert sum(h.nbytes for h in profile.holdings if h.op.startswith("aten::cos")) == table
    result = model(batch)
    assert torch.equal(result, reference.net(batch) * reference.make()), "the model runs on what the simulation left"


# --------------------------------------------------------------------------------------------------- where tensors are


META = [
    "views_and_aliases",
    "transformer",
    "norms_and_dropout",
    "batch_norm",
    "plan_checkpoint",
    "lora",
]


@pytest.mark.parametrize("name", META)
def test_a_model_on_meta_has_the_profile_of_the_same_model_on_the_cpu(name):
    on_cpu, on_meta = CASES[name](), CASES[name]()
    on_meta.model.to("meta")
    on_meta.optimizer = adamw([parameter for parameter in on_meta.model.parameters() if parameter.requires_grad])
    expected = on_cpu.profile()
    for batch in (on_meta.batch, torch.utils._pytree.tree_map(lambda t: t.to("meta"), on_meta.batch)):
        found = ms.profile(
            on_meta.model, batch, optimizer=on_meta.optimizer, loss=on_meta.loss, plan=on_meta.plan, hardware="cpu"
        )
        assert (found.peak_bytes, found.first_step_peak_bytes) == (expected.peak_bytes, expected.first_step_peak_bytes)
        assert found.by_category == expected.by_category
        assert found.flops == expected.flops
        assert all(tensor.is_meta for tensor in [*on_meta.model.parameters(), *on_meta.model.buffers()])


def test_tied_weights_stay_tied_on_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48))
        model[1].weight = model[0].weight
    profile = ms.profile(model, x(9, 48), loss=mean, hardware="cpu")
    assert profile.by_category["parameter"] == (48 * 48 + 2 * 48) * 4


# ------------------------------------------------------------------------------------------------------ what it says


def test_categories_say_what_each_byte_is_for():
    model, batch = mlp(), x(ROWS, 48)
    profile = train(model, batch).profile()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert profile.by_category["parameter"] == weights
    assert profile.by_category["input"] == batch.nbytes
    assert profile.by_category["optimizer state"] == 2 * weights + 4 * 4
    assert sum(profile.by_category.values()) == sum(profile.by_module.values()) == profile.peak_bytes
    assert int(profile.timeline.total_bytes.max()) == profile.peak_bytes
    assert sum(holding.nbytes for holding in profile.holdings) == profile.peak_bytes
    assert profile.flops == 2 * 3 * ROWS * (48 * 144 + 144 * 20) - 2 * ROWS * 48 * 144  # no gradient of the input


def test_activations_have_the_path_of_the_module_that_made_them():
    model = nn.Sequential(mlp(48, 48), mlp(48, 48))
    profile = train(model, x(ROWS, 48)).profile()
    kept = {
        (holding.path, holding.op, holding.shape) for holding in profile.holdings if holding.category == "activation"
    }
    assert ("0.0", "aten::addmm", (ROWS, 144)) in kept
    assert {path for path, _, _ in kept} <= {"0.0", "0.1", "0.2", "1.0", "1.1", "1.2", ""}


def test_a_plan_saves_what_it_saves_for_real():
    plain, checkpointed = CASES["plan_checkpoint"](), CASES["plan_checkpoint"]()
    plain.plan = None
    saved = plain.profile().peak_bytes - checkpointed.profile().peak_bytes
    assert (
        saved
        == real_peaks(plain.step, plain.model, plain.optimizer, plain.batch)[1]
        - real_peaks(checkpointed.step, checkpointed.model, checkpointed.optimizer, checkpointed.batch)[1]
    )
    assert saved > 0


def test_8_bit_states_of_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes, whose kernels are custom operators")
    model, batch = mlp(320, 512), x(16, 320)
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    profile = ms.profile(model, batch, optimizer=optimizer, loss=mean)
    assert profile.method == "static"
    model(batch).square().mean().backward()
    optimizer.step()
    states = [tensor for state in optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    own_bytes = sum(tensor.nbytes for tensor in states if tensor.shape != (256,))
    shared_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in states if tensor.shape == (256,)}.values())
    assert profile.by_category["optimizer state"] - own_bytes in (0, shared_bytes)  # tables, made when first needed
