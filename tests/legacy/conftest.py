"""The device at hand, as `wrap` sees it."""

import pytest

from memscale.hardware.device import Hardware


@pytest.fixture
def device(monkeypatch):
    """Sets the device at hand, by the MiB of its memory."""

    def of(mib, **fields):
        box = Hardware(name="box", device_type="cpu", memory_bytes=int(mib * 2**20), **fields)
        monkeypatch.setattr(Hardware, "detect", lambda device=None: box)

    return of
