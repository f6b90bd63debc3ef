"""A profile tells what a transformers model's cache of keys and values takes of a training step."""

import pytest
import torch

import memscale as ms

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_profile_says_what_the_cache_takes(use_cache):
    with torch.device("meta"):
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, use_cache=use_cache)
        model = transformers.GPT2LMHeadModel(config)
        batch = dict.fromkeys(("input_ids", "labels"), torch.zeros(4, 16, dtype=torch.long))
    notes = [note for note in ms.profile(model, batch, hardware="t4").notes if "use_cache" in note]
    # Keys and values of two layers, 4 x 16 tokens of 32 numbers of 4 bytes.
    assert notes == ["the output keeps 32.0 KiB of keys and values, which training does not read: "
                     "model.config.use_cache = False frees them"][: int(use_cache)]  # fmt: skip
