"""What a Hugging Face model does of its own that a wrapped one must not: fill caches, recompute, save its settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from memscale.algebra import OfModule
from memscale.config import Config
from memscale.legacy.log import say

_FLAG = "gradient_checkpointing"  # of a layer or a stack of them: whether it recomputes itself
_SWITCH = "_set_gradient_checkpointing"  # what every way to set these goes through
_SET_ASIDE = "_memscale_set_aside"  # on a module whose flag is off because a plan covers the model


class _Switch(OfModule):
    """In place of the method that switches a wrapped model's own checkpointing."""

    def __init__(self, module: nn.Module, config: Config) -> None:
        super().__init__(module)
        self.config = config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        for part in module.modules():
            part.__dict__.pop(_SET_ASIDE, None)  # this call says anew what holds after `detach`
        result = self.__wrapped__(*args, **kwargs)
        if checkpointing_off(module):
            say(self.config, f"{_off(module)}: the plan of wrap() covers it; detach() makes it hold")
        return result

    @property
    def __wrapped__(self) -> Any:
        return getattr(type(self.module), _SWITCH).__get__(self.module)


class _Saver(OfModule):
    """In place of ``save_pretrained``: what is saved has the caller's ``use_cache``, not the one of a wrapped model."""

    def __init__(self, module: nn.Module, settings: list[Any]) -> None:
        super().__init__(module)
        self.settings = settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for each in self.settings:
            each.use_cache = True
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            for each in self.settings:
                each.use_cache = False

    @property
    def __wrapped__(self) -> Any:
        return type(self.module).save_pretrained.__get__(self.module)  # type: ignore[attr-defined]


def caches_off(model: nn.Module, config: Config) -> list[Any]:
    """Switch off the ``use_cache`` of the model's configs, nested ones too, and return those that had it on.

    A cache that is filled again by a recompute holds every key twice.
    """
    settings = list(_caching(model))
    for each in settings:
        each.use_cache = False
        say(config, f"{type(each).__name__}.use_cache is False while wrapped; detach() restores it")
    for module in model.modules() if settings else ():
        if hasattr(type(module), "save_pretrained") and "save_pretrained" not in module.__dict__:
            module.__dict__["save_pretrained"] = _Saver(module, settings)
    return settings


def caches_on(model: nn.Module, settings: list[Any]) -> None:
    """Undo `caches_off`."""
    for each in settings:
        each.use_cache = True
    for module in model.modules():
        if isinstance(module.__dict__.get("save_pretrained"), _Saver):
            del module.__dict__["save_pretrained"]


def checkpointing_off(model: nn.Module) -> bool:
    """Switch off the model's own checkpointing, inside which a region keeps nothing; whether there was any."""
    found = [module for module in model.modules() if getattr(module, _FLAG, False) is True]
    for module in found:
        setattr(module, _FLAG, False)
        module.__dict__[_SET_ASIDE] = True
    return bool(found)


def checkpointing_on(model: nn.Module) -> None:
    """Undo `checkpointing_off`."""
    for module in model.modules():
        if module.__dict__.pop(_SET_ASIDE, False):
            setattr(module, _FLAG, True)


def keep_checkpointing_off(model: nn.Module, config: Config) -> None:
    """Switch off the model's own checkpointing until `let_checkpointing`, also where it is switched on meanwhile."""
    if checkpointing_off(model):
        say(config, f"{_off(model)} while wrapped, where the plan recomputes; detach() restores it")
    for module in model.modules():
        if hasattr(type(module), _SWITCH) and _SWITCH not in module.__dict__:
            module.__dict__[_SWITCH] = _Switch(module, config)


def let_checkpointing(model: nn.Module) -> None:
    """Undo `keep_checkpointing_off`."""
    for module in model.modules():
        if isinstance(module.__dict__.get(_SWITCH), _Switch):
            del module.__dict__[_SWITCH]
    checkpointing_on(model)


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
