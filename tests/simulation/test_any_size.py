"""`profile` at sizes that only a card could hold: what a model asks of its positions and masks is answered, truly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale as ms
from tests.support.profiled import Forward
from tests.support.steps import mean

# Above 2^17 numbers of 64 bits nothing is computed at each operator any more; what is asked for, is.
ROWS, LENGTH = 48, 1 << 13


def positions(tokens):
    return torch.arange(tokens.shape[1]).unsqueeze(0).expand(tokens.shape)


def begins_once(tokens):
    """As transformers asks whether sequences are packed."""
    where = positions(tokens)
    differs = torch.diff(where, prepend=where[:, :1] - 1, dim=-1) != 1
    return bool((differs.cumsum(-1)[:, -1] == 0).all())


def shifted(tokens):
    """As an encoder and decoder shifts its labels, with writes through views."""
    moved = tokens.new_zeros(tokens.shape)
    moved[:, 1:] = tokens[:, :-1].clone()
    moved[:, 0] = 7
    moved.masked_fill_(moved == 5, -100)
    return int(moved.sum()), int((moved == -100).sum()), int(moved[:, 0].min())


def mask(tokens):
    """A mask of the size of all pairs of a row, most of which is one row repeated."""
    length = tokens.shape[1] // 8
    where = torch.arange(length)
    causal = (where[None, :] <= where[:, None])[None, None].expand(len(tokens), 1, length, length)
    padded = torch.ones(len(tokens), length)[:, None, None, :].bool()
    return bool((causal & padded).all()), bool((causal | ~causal).all()), bool(causal[:, :, -1].all())


def selected(tokens):
    return (tokens == 3).nonzero().shape[0], tokens[tokens > 4].shape[0], int(tokens.max()), tokens[:, :3].tolist()


def written_after(tokens):
    """A value is that of the moment at which it was computed, whatever is written later."""
    first = tokens + 1
    before = first == 4
    first[:, ::2] = 0
    return int(before.sum()), int((first == 0).sum()), int(first.transpose(0, 1)[1].sum())


@pytest.mark.parametrize("asked", [begins_once, shifted, mask, selected, written_after], ids=lambda f: f.__name__)
def test_what_a_model_asks_of_many_tokens_has_its_real_answer(asked):
    tokens = torch.randint(9, (ROWS, LENGTH))
    before, expected = tokens.clone(), asked(tokens)

    def forward(m, tokens):
        answer = asked(tokens)
        if answer != expected:
            raise RuntimeError(f"{answer} is not {expected}")
        return m.layer(tokens[:, :8].float())

    profile = ms.profile(Forward(forward, layer=nn.Linear(8, 8)), tokens, loss=mean)
    assert profile.method == "static", profile.notes
    assert profile.notes == ()
    assert torch.equal(tokens, before)


def test_a_model_on_meta_is_asked_at_sizes_beyond_those_of_the_host():
    def forward(m, tokens):
        if not begins_once(tokens):
            raise RuntimeError("these are not positions")
        return m.layer(tokens.view(-1, 8).float())

    tokens = torch.empty(1 << 9, LENGTH, dtype=torch.long, device="meta")
    model = Forward(forward, layer=nn.Linear(8, 8, device="meta"))
    assert ms.profile(model, tokens, loss=mean).peak_bytes > 1 << 26


def test_what_follows_from_weights_is_not_known_at_any_size():
    def forward(m, tokens):
        hidden = m.layer(tokens[:, :8].float())
        return hidden if bool((hidden > 0).all()) else hidden + 1

    model = Forward(forward, layer=nn.Linear(8, 8))
    quiet = ms.Config(use_empirical_fallback=False)
    profiler = ms.MemoryProfiler(model, loss=mean, config=quiet)
    for rows in (48, 1 << 17):
        with pytest.raises(ms.ConfigError, match="cannot be simulated"):
            profiler.profile(torch.empty(rows, 8, dtype=torch.long).zero_())


def test_what_follows_from_a_choice_is_noted_at_any_size():
    def forward(m, tokens):
        hidden = m.layer(tokens.float())
        return hidden if bool((hidden.argmax(-1) == 1).all()) else hidden + 1

    model = Forward(forward, layer=nn.Linear(8, 8))
    for rows in (48, 1 << 18):
        profile = ms.profile(model, torch.zeros(rows, 8, dtype=torch.long), loss=mean)
        assert any("random activations were assumed" in note for note in profile.notes)


def test_a_batch_on_meta_is_said_to_be_zeros_where_the_step_fails_of_it():
    class LastToken(nn.Module):  # as mBART shifts its labels, by the last that is no padding
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, 4)

        def forward(self, tokens):
            last = tokens.ne(0).sum(1, keepdim=True) - 1
            return self.embed(tokens.gather(1, last)).sum()

    model = LastToken().to("meta")
    with pytest.raises(ms.ConfigError, match="on meta are taken for zeros, which may be padding"):
        ms.profile(model, torch.ones(2, 4, dtype=torch.long, device="meta"), loss=lambda y, _: y, hardware="h100")
    real = ms.profile(model, torch.ones(2, 4, dtype=torch.long), loss=lambda y, _: y, hardware="h100")
    assert real.method == "static"
