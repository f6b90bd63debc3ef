"""`wrap` and `detach` beside what others do to a model: own checkpointing, replaced forwards, replicas, saving."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import warnings

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.planning import DecisionEngine
from tests.legacy.test_legacy import gpt2

FORCE = ms.Config(force_optimize=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inside(x))


def blocks(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(count)])


def step(model: nn.Module) -> list[torch.Tensor]:
    """The gradients of one step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    return gradients


def switch(model: nn.Module, on: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its name of before transformers 5
        model.gradient_checkpointing_enable() if on else model.gradient_checkpointing_disable()


def flags(model: nn.Module) -> list[bool]:
    return [module.gradient_checkpointing for module in model.modules() if hasattr(module, "gradient_checkpointing")]


@pytest.mark.parametrize("path", ["", "1"])
def test_a_forward_that_others_put_over_a_region_stays(path: str, caplog: pytest.LogCaptureFixture) -> None:
    model = ms.wrap(blocks(), FORCE)
    if not path:
        ms.wrap(model, ms.Config())  # the root is watched
    module = model.get_submodule(path)
    under = module.forward
    calls = []

    def other(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return under(x)

    module.forward = other
    with caplog.at_level(logging.WARNING, logger="memscale"):
        ms.detach(model)
    assert module.__dict__["forward"] is other
    assert [record for record in caplog.records if "other" in record.getMessage()]
    assert all(torch.equal(*pair) for pair in zip(step(model), step(blocks()), strict=True))
    assert len(calls) == 1  # a region would have run it again
    del module.forward
    assert not any("forward" in each.__dict__ for each in model.modules())


def test_a_model_does_not_recompute_itself_while_wrapped() -> None:
    model = gpt2()
    before = [dict(module.__dict__) for module in model.modules()]
    switch(model, True)
    was = flags(model)
    assert any(was)
    ms.wrap(model, FORCE)
    assert not any(flags(model))
    switch(model, True)  # as a Trainer does when it begins to train
    assert not any(flags(model))
    copied = copy.deepcopy(model)
    ms.detach(copied)
    assert flags(copied) == was
    ms.detach(model)
    assert flags(model) == was
    switch(model, False)
    for module, attributes in zip(model.modules(), before, strict=True):
        added = module.__dict__.keys() - attributes.keys()  # Hugging Face's own
        assert all("gradient_checkpointing" in name or "_require_grads_hook" in name for name in added)


def test_other_threads_see_its_own_checkpointing_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()
    switch(model, True)
    was, seen = flags(model), []

    def plan(*_):
        seen.append(flags(model))
        raise KeyboardInterrupt

    monkeypatch.setattr(DecisionEngine, "plan", plan)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with pytest.raises(KeyboardInterrupt):
        ms.wrap(model, ms.Config(enable_logging=False), {"input_ids": tokens, "labels": tokens}, budget="100KiB")
    assert seen == [was]


def test_what_is_switched_while_wrapped_holds_afterwards() -> None:
    model = gpt2()
    switch(model, True)
    ms.wrap(model, FORCE)
    switch(model, False)
    ms.detach(model)
    assert not any(flags(model))


def test_its_own_checkpointing_stays_where_the_config_forbids_ours() -> None:
    model = gpt2()
    switch(model, True)
    was = flags(model)
    ms.wrap(model, ms.Config(enable_checkpointing=False, force_optimize=True))
    assert flags(model) == was


def test_a_saved_config_has_the_cache_of_its_owner(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = ms.wrap(gpt2(), FORCE)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["use_cache"] is True
    assert model.config.use_cache is False
    again = pickle.loads(pickle.dumps(model))
    ms.detach(model)
    assert model.config.use_cache is True
    assert "save_pretrained" not in model.__dict__
    ms.detach(again)
    assert again.config.use_cache is True


class Children(nn.Module):
    """Calls what its blocks are made of, as a training step does that is not in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = torch.tanh(block.inside(x))
        return x


def test_regions_that_never_run_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = ms.wrap(Children(), FORCE)
    with caplog.at_level(logging.WARNING, logger="memscale"):
        step(model)
        step(model)
    assert caplog.text.count("nothing ran of 'h.*'") == 1
    assert model._memscale_executor.regions_that_ran == ()
    assert "nothing ran of 'h.*'" in str(model._memscale_executor)


def test_a_forward_that_is_never_called_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = ms.wrap(blocks())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with caplog.at_level(logging.WARNING, logger="memscale"):
        model[0](torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert "saw no call of this Sequential in a training step" in caplog.text


def test_what_recomputes_or_replicates_outside_of_wrap_is_refused() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = blocks()
    with pytest.raises(ms.RuntimeUnavailable, match=r"'1' .*CheckpointWrapper.*preserve_rng_state"):
        ms.wrap(nn.Sequential(Block(), checkpoint_wrapper(Block(), preserve_rng_state=False)), FORCE)
    parallel = nn.DataParallel(model)
    parallel.device_ids = [0, 1]  # as where there are two
    with pytest.raises(ms.RuntimeUnavailable, match=r"DataParallel.*torchrun"):
        ms.wrap(parallel, FORCE)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("how", ["wrap", "transform"])
def test_replicas_of_a_region_are_refused(how: str) -> None:
    model = ms.wrap(blocks(), FORCE) if how == "wrap" else ms.transform(blocks(), {"*": ms.checkpoint()})
    with pytest.raises(ms.TransformError, match=r"nn.DataParallel replicates a Block.*torchrun"):
        model[1]._replicate_for_data_parallel()  # what nn.DataParallel does with each module
    copied = copy.deepcopy(model)
    with pytest.raises(ms.TransformError, match=r"nn.DataParallel replicates a Block"):
        copied[0]._replicate_for_data_parallel()
    if how == "wrap":
        ms.detach(model)
        assert not any("_replicate_for_data_parallel" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("how", ["wrap", "transform"])
def test_a_shallow_copy_of_a_region_is_refused_and_other_copies_run_as_themselves(how: str) -> None:
    model = ms.wrap(blocks(), FORCE) if how == "wrap" else ms.transform(blocks(), {"*": ms.checkpoint()})
    with pytest.raises(ms.TransformError, match=r"this Block is a copy.copy of one .*copy.deepcopy"):
        copy.copy(model[1])(torch.ones(2, 8))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            copied[1].inside.weight.zero_()
        assert not torch.equal(step(copied)[2], step(blocks())[2])
        with pytest.raises(ms.TransformError, match=r"copy.copy"):
            copy.copy(copied[0])(torch.ones(2, 8))
    if how == "wrap":
        ms.detach(model)
        assert not any("__getstate__" in module.__dict__ for module in model.modules())


class Stateful(Block):
    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "was": "saved"}


def test_a_module_that_says_what_its_copies_are_made_of_still_does() -> None:
    torch.manual_seed(0)
    model = ms.transform(nn.Sequential(Stateful(), Block()), {"*": ms.checkpoint()})
    copied = copy.deepcopy(model)
    assert copied[0].was == "saved"
    assert torch.equal(copied(torch.ones(2, 8)), model(torch.ones(2, 8)))


def test_transform_tells_of_a_models_own_checkpointing() -> None:
    model = gpt2()
    switch(model, True)
    with pytest.warns(RuntimeWarning, match=r"own activation checkpointing is on .*'transformer.h.0'"):
        ms.transform(model, {"transformer.h.0": ms.checkpoint()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ms.transform(model, {"lm_head": ms.checkpoint()})  # nothing there recomputes itself
        switch(model, False)
        ms.transform(model, {"transformer.h.*": ms.checkpoint()})


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_that_has_lost_a_block_is_copied(duplicate):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    ms.wrap(model, ms.Config(force_optimize=True, enable_logging=False))
    model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    del model[1]
    copied = duplicate(model)
    for each in (model, copied):
        each(torch.ones(2, 4)).sum().backward()
    assert torch.equal(copied[0][0].weight.grad, model[0][0].weight.grad)
    ms.detach(copied)
    assert "forward" not in copied[0].__dict__
