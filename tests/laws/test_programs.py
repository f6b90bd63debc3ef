"""Random programs with and without transforms: the same numbers, or an error where the docs say that there is one."""

import io
import os
import threading
from collections import Counter
from contextlib import redirect_stdout

import pytest
import torch
from hypothesis import assume, given, settings
from torch import nn

import memscale as ms
from tests.support import programs


@pytest.fixture(scope="module", autouse=True)
def _during_simulations():
    """With ``make fuzz BESIDE=1`` another thread simulates all the time, on a CPU and for a card, unseen."""
    if not os.environ.get("FUZZ_BESIDE"):
        yield
        return
    done, wrong = threading.Event(), []

    def simulate():
        model = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 32), nn.Dropout(0.1), nn.LSTM(32, 32, batch_first=True))
        batch, optimizer = torch.ones(4, 8, 32), torch.optim.AdamW(model.parameters())
        said = set()
        while not done.is_set():
            for hardware in (None, "h100"):
                profile = ms.profile(model, batch, optimizer=optimizer, loss=_of_first, hardware=hardware)
                said.add((hardware, profile.peak_bytes, profile.reserved_peak_bytes))
        if len(said) != 2:
            wrong.append(said)

    thread = threading.Thread(target=simulate)
    thread.start()
    yield
    done.set()
    thread.join()
    assert not wrong


def _of_first(output, _):
    return output[0].square().mean()


def fails(program):
    """What is wrong with the transformed run of `program`, or `None`; and how the two runs compare."""
    found, plain, other = programs.differences(program)
    if isinstance(other.error, ms.MemscaleError) and plain.error is None:
        if not program.refused(other.error):
            return f"refused for no reason that the docs give: {other.error}", "refused"
        return None, "refused"
    if plain.error is not None and other.error is None and program.spared() and "inplace" in str(plain.error):
        return None, "spared"
    if (plain.error is None) != (other.error is None):
        return f"plain: {plain.error!r}; transformed: {other.error!r}", "raised"
    if found:
        return f"different: {', '.join(found)}", "different"
    return None, "same" if plain.error is None else "both raise"


@pytest.mark.parametrize("sort", [programs.EXACT, programs.TILED, programs.CASTED])
def test_a_random_program_gives_the_same_numbers(sort):
    ends = Counter()

    @settings(max_examples=max(30, settings().max_examples))
    @given(programs.programs(sort))
    def check(program):
        # The default dtype is of all threads: the simulation beside would rightly take more for it.
        assume(not program.is_wrong_in_pytorch())
        assume(not (os.environ.get("FUZZ_BESIDE") and "around: default dtype" in program.features()))
        wrong, end = fails(program)
        ends[end] += 1
        if wrong is not None:  # shown at once: a run of hours may be ended before its report
            print(f"{wrong}\n\n{program}\n", flush=True)
        assert wrong is None, f"{wrong}\n\n{program}"

    check()
    # A memscale that refuses everything, or programs that run nowhere, would pass the above.
    assert ends["same"] >= sum(ends.values()) / 2, ends


def test_a_difference_is_found_and_its_program_printed_shows_it():
    """Rows that depend on their count show only in the numbers, if each piece is one row."""
    step = programs.Step("nothing", (), "backward", ())
    blocks = ((("linear", "number of rows"), "two"),)
    program = programs.Program(blocks, ((0, "sin"),), False, (step,), (("b0", ms.tile(size=1)),))
    wrong, end = fails(program)
    assert end == "different", wrong
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(str(program), {"__name__": "printed"})
    assert "plain\noutput: " in printed.getvalue()
    assert "transformed\noutput: " in printed.getvalue()
