"""``memscale cards``: every card of the table, once."""

import json

import memscale as ms
from memscale.cli import main
from memscale.hardware import card_names


def test_each_card_is_a_row_with_the_memory_that_is_usable(capsys):
    assert main(["cards"]) == 0
    header, *rows, last = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == ["name", "GiB", "usable", "dtype", "TFLOP/s", "GB/s", "host", "GB/s"]
    assert last[-2:] == ["cards", "--json"]
    assert [row[0] for row in rows] == list(card_names())
    for name, total, usable, dtype, *_ in rows:
        card = ms.Hardware.named(name)
        assert (total, usable) == (f"{card.memory_bytes / 2**30:.2f}", f"{card.usable_bytes / 2**30:.2f}")
        assert (dtype == "bfloat16") == ("bfloat16" in card.flops_per_second)


def test_json_is_the_hardware_that_the_library_has(capsys):
    assert main(["cards", "--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(found) == list(card_names())
    for name, row in found.items():
        card = ms.Hardware.from_json(json.dumps(row["hardware"]))
        assert card == ms.Hardware.named(name)
        assert (row["usable_bytes"], bool(row["source"])) == (card.usable_bytes, True)
