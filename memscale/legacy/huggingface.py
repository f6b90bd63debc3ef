"""Turns off what a Hugging Face model must not do while wrapped: fill caches, recompute, and save changed settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from memscale.algebra import OfModule
from memscale.config import Config
from memscale.legacy.assumed import with_attribute
from memscale.legacy.log import say

_FLAG = "gradient_checkpointing"  # attribute of a layer or a stack of layers: whether it recomputes itself
_SET_ASIDE = "_memscale_set_aside"  # marks a module whose flag was switched off because a plan covers the model


class _Method(OfModule):
    """Replaces the method `name` of a module; `known` is the data that the replacement needs."""

    name: str

    def __init__(self, module: nn.Module, known: Any) -> None:
        super().__init__(module)
        self.known = known

    @property
    def __wrapped__(self) -> Any:
        return getattr(type(self.module), self.name).__get__(self.module)

    @classmethod
    def put_on(cls, model: nn.Module, known: Any) -> None:
        for module in model.modules():
            if hasattr(type(module), cls.name) and cls.name not in module.__dict__:
                module.__dict__[cls.name] = cls(module, known)

    @classmethod
    def take_off(cls, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module.__dict__.get(cls.name), cls):
                del module.__dict__[cls.name]


class _Switch(_Method):
    """Replaces the method through which a model's own checkpointing is switched: its flags stay off until `detach`."""

    name = "_set_gradient_checkpointing"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        for part in module.modules():
            part.__dict__.pop(_SET_ASIDE, None)  # this call determines the flags that hold after `detach`
        result = self.__wrapped__(*args, **kwargs)
        if _switch_off(module):
            say(self.known, f"{_off(module)}: the plan of wrap() replaces it; after detach() this call takes effect")
        return result


class _Saver(_Method):
    """Saves a wrapped model with the caller's ``use_cache``; `known` are the configs that had it on."""

    name = "save_pretrained"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _set_caches(self.known, True)
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            _set_caches(self.known, False)


def caches_off(model: nn.Module, config: Config) -> list[Any]:
    """Sets ``use_cache`` to False in the model's configs, nested ones too; returns those that had it on.

    A recompute would fill the cache a second time, so that it held every key twice.
    """
    settings = list(_caching(model))
    _set_caches(settings, False)
    for each in settings:
        say(config, f"{type(each).__name__}.use_cache is False while wrapped; detach() restores it")
    if settings:
        _Saver.put_on(model, settings)
    return settings


def caches_on(model: nn.Module, settings: list[Any]) -> None:
    """Undoes `caches_off`."""
    _set_caches(settings, True)
    _Saver.take_off(model)


def _set_caches(settings: list[Any], value: bool) -> None:
    for each in settings:
        each.use_cache = value


def without_checkpointing(model: nn.Module) -> nn.Module | None:
    """Returns a copy that shares all tensors, with the model's own checkpointing off; None if it is off in `model`."""
    found = _recomputing(model)
    return with_attribute(model, found, _FLAG, False) if found else None


def _recomputing(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if getattr(module, _FLAG, False) is True]


def _switch_off(model: nn.Module) -> bool:
    """Switches the model's own checkpointing off, inside which no region keeps anything; returns whether it was on."""
    found = _recomputing(model)
    for module in found:
        setattr(module, _FLAG, False)
        module.__dict__[_SET_ASIDE] = True
    return bool(found)


def keep_checkpointing_off(model: nn.Module, config: Config) -> None:
    """Switches the model's own checkpointing off until `let_checkpointing`, even if it is switched on in between."""
    if _switch_off(model):
        say(config, f"{_off(model)} while wrapped, where the plan recomputes; detach() restores it")
    _Switch.put_on(model, config)


def let_checkpointing(model: nn.Module) -> None:
    """Undoes `keep_checkpointing_off`."""
    _Switch.take_off(model)
    for module in model.modules():
        if module.__dict__.pop(_SET_ASIDE, False):
            setattr(module, _FLAG, True)


def _off(model: nn.Module) -> str:
    return f"{type(model).__name__}'s own activation checkpointing is off"


def _caching(model: nn.Module) -> Iterator[Any]:
    pending = [vars(module).get("config") for module in model.modules()]
    seen: set[int] = set()
    while pending:
        settings = pending.pop()
        if id(settings) in seen or not hasattr(settings, "__dict__") or isinstance(settings, (type, nn.Module)):
            continue
        seen.add(id(settings))
        if vars(settings).get("use_cache") is True:
            yield settings
        pending += [value for key, value in vars(settings).items() if key.endswith("config")]
