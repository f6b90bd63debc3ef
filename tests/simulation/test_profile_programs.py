"""`profile` against the allocator, to the byte: shapes from values, loops, and whole models."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.profiled import ROWS, Cases, Forward, mlp, train, x
from tests.support.steps import assert_exact

CASES = Cases()
case, forward_case = CASES.case, CASES.forward_case


# ----------------------------------------------------------------------------------------- shapes from known values


@forward_case(
    lambda forward: train(
        Forward(forward, embed=nn.Embedding(360, 48), net=mlp()),
        (torch.arange(360).reshape(8, 45), torch.tensor([3, 45, 1, 5, 30, 2, 17, 11])),
    )
)
def lengths_that_are_known(m, tokens, lengths):
    hidden = m.embed(tokens)
    rows = [m.net(hidden[i, : int(n)]).sum(0) for i, n in enumerate(lengths)]
    return torch.stack(rows)


@case
def a_mask_that_selects():
    def forward(m, tokens, mask):
        return m.net(m.embed(tokens)[mask])

    mask = torch.arange(360).reshape(8, 45) % 3 > 0
    return train(Forward(forward, embed=nn.Embedding(360, 48), net=mlp()), (torch.arange(360).reshape(8, 45), mask))


@case
def numbers_that_are_put_where_a_mask_says():
    """Backward copies the gradient before it puts zeros there, by three indices of each number."""

    def forward(m, x, mask):
        hidden = m.net(x)
        hidden[mask] = x[mask]
        return hidden

    mask = torch.arange(8 * 45 * 20).reshape(8, 45, 20) % 10 > 0
    return train(Forward(forward, net=nn.Linear(20, 20)), (x(8, 45, 20), mask))


def graph(layout, edges=3000, nodes=300):
    """The weights of a graph's edges, some of which are there twice."""
    where = torch.arange(2 * edges).reshape(2, edges) * 7 % nodes
    weights = torch.sparse_coo_tensor(where, x(edges), (nodes, nodes), check_invariants=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        return weights if layout is torch.sparse_coo else weights.coalesce().to_sparse(layout=layout)


def graph_network(layout):
    def forward(m, features, edges):
        hidden = torch.relu(edges @ m.one(features))
        return torch.sparse.addmm(m.two(hidden), edges.t(), m.two(hidden))

    parts = {"one": nn.Linear(20, 48), "two": nn.Linear(48, 20)}
    return train(Forward(forward, **parts), (x(300, 20), graph(layout)))


@case
def a_graph_network():
    return graph_network(torch.sparse_coo)


@case
def a_graph_network_of_rows():
    return graph_network(torch.sparse_csr)


@forward_case(lambda forward: train(Forward(forward, net=nn.Linear(20, 20)), (x(300, 20), graph(torch.sparse_coo))))
def edges_that_are_weighted_and_summed(m, features, edges):
    degrees = torch.sparse.sum(edges, 1).to_dense()[:, None]
    edges = edges.coalesce()
    start, end = edges.indices()
    messages = m.net(features)[end] * edges.values()[:, None] / degrees[start]
    return torch.zeros(300, 20).index_add(0, start, messages) + edges.to_dense() @ m.net(features)


@forward_case(
    lambda forward: train(Forward(forward, embed=nn.Embedding(360, 48), net=mlp()), torch.arange(360).reshape(8, 45))
)
def tokens_that_are_found(m, tokens):
    where = (tokens == 7).nonzero(as_tuple=True)
    ends = tokens.eq(35).int().argmax(-1)
    hidden = m.embed(tokens)
    return m.net(hidden[where]).sum() + m.net(hidden[torch.arange(8), ends]).sum() + m.net(hidden[tokens.ne(0)]).mean()


@forward_case(
    lambda forward: train(
        Forward(forward, embed=nn.Embedding(360, 48), net=mlp()), (torch.arange(300) % 47, torch.arange(300) % 4)
    )
)
def unique_and_repeat_interleave(m, tokens, counts):
    kinds, back = tokens.unique(return_inverse=True)
    hidden = m.net(m.embed(kinds))[back]
    return hidden.repeat_interleave(counts, dim=0)


@forward_case(
    lambda forward: train(
        Forward(forward, embed=nn.Embedding(360, 48), net=mlp()), (torch.arange(300), torch.tensor([0, 40, 190, 300]))
    )
)
def a_packed_batch(m, tokens, offsets):
    parts = m.embed(tokens).tensor_split(offsets[1:-1])
    return torch.stack([m.net(part).mean(0) for part in parts])


# ------------------------------------------------------------------------------------------------- loops and wholes


@case
def gradient_accumulation_of_a_tied_model():
    model = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48))
    model[2].weight = model[0].weight
    return train(model, x(ROWS, 48), accumulate=2)


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


@forward_case(lambda forward: train(Forward(forward, qkv=nn.Linear(64, 192), out=nn.Linear(64, 64)), x(2, 17, 64)))
def attention(m, y):
    q, k, v = m.qkv(y).view(2, 17, 3, 4, 16).permute(2, 0, 3, 1, 4)
    return m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


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


@forward_case(lambda forward: train(Forward(forward, net=mlp()), x(ROWS, 48)))
def vmapped_ensemble(m, y):
    weights = {name: value.expand(4, *value.shape) for name, value in m.net.named_parameters()}
    return torch.func.vmap(lambda w: torch.func.functional_call(m.net, w, (y,)))(weights)


@forward_case(lambda forward: train(Forward(forward, net=mlp(16, 5)), x(7, 16), loss=None))
def per_sample_gradients(m, y):
    weights = dict(m.net.named_parameters())

    def one(w, row):
        return torch.func.functional_call(m.net, w, (row,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(weights, y)
    return sum(gradient.square().sum() for gradient in per_sample.values())


@forward_case(lambda forward: train(Forward(forward, one=nn.Linear(48, 64)), x(ROWS, 48), loss=None))
def einsum_and_friends(m, y):
    y = torch.einsum("bi,ij->bj", y, m.one.weight.t())
    y = torch.cat([y, y.roll(1, 0), y.flip(1)], dim=1).view(ROWS, 3, -1)
    y = torch.stack(y.unbind(1), 0).permute(1, 0, 2).contiguous()
    y = torch.where(y > 0, y, 0.1 * y).pow(2).cumsum(1)
    return y.square().sum(-1).max() + y.std() + F.pad(y, (1, 2)).tril().norm()


def _ending_in(function, held=tuple):
    return train(Forward(lambda m, y: function(m.one(y)), one=nn.Linear(48, 64)), x(ROWS, 48), None, None, held=held)


@case
def product_with_a_mask_of_flags():
    mask = x(ROWS, 64) > 0
    return _ending_in(lambda y: (y * mask).mean(), lambda: [mask])


@case
def sum_of_a_linear_layer():
    return _ending_in(torch.sum)


@case
def squared_error():
    return _ending_in(lambda y: F.mse_loss(y.sin(), torch.zeros_like(y)) + y.cos().exp().sum())


@forward_case(
    lambda forward: train(
        Forward(forward, bag=nn.EmbeddingBag(60, 24), head=nn.Linear(24, 5)),
        (torch.arange(50), torch.tensor([0, 7, 30])),
    )
)
def an_embedding_of_bags(m, tokens, offsets):
    return m.head(m.bag(tokens, offsets))


@forward_case(lambda forward: train(Forward(forward, one=nn.Linear(48, 64)), x(ROWS, 48)))
def gradient_through_sort_and_gather(m, y):
    y, order = m.one(y).sort(-1)
    return y.gather(-1, order) * y.scatter(-1, order, 1.0) + y.topk(5).values.sum()


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_a_simulated_step_takes_what_a_real_one_takes(make):
    assert_exact(make())
