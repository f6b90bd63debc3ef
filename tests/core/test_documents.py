"""The header of JSON documents: four kinds, one way to be wrong."""

import json

import pytest
import torch

import memscale as ms


def a_profile():
    return ms.profile(torch.nn.Linear(2, 2), torch.ones(1, 2), loss=lambda y, _: y.sum())


MAKERS = {
    "plan": (ms.Plan, lambda: ms.Plan({"*": ms.checkpoint()})),
    "hardware": (ms.Hardware, lambda: ms.Hardware("H", "cpu", 1)),
    "profile": (ms.Profile, a_profile),
    "prediction": (ms.OOMPrediction, lambda: ms.OOMPrediction(a_profile(), 1)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_begins_with_its_header_and_reads_itself_back(name):
    kind, make = MAKERS[name]
    value = make()
    assert next(iter(json.loads(value.to_json()).items())) == (f"memscale_{name}", 1)
    assert kind.from_json(value.to_json()) == value


@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_refuses_other_texts_in_the_same_words(name):
    kind, make = MAKERS[name]
    error = ms.PlanError if name == "plan" else ms.ConfigError
    text = make().to_json()
    other = next(each for each in MAKERS if each != name)
    new = f"the {name} has schema version 2, and this version of memscale reads version 1"
    refused = {
        text[:-3]: f"the {name} is not JSON, or was cut off: .*; write it with {kind.__name__}.to_json",
        "[]": f"the text is no {name} of memscale; write one with {kind.__name__}.to_json",
        MAKERS[other][1]().to_json(): f"the text is no {name} of memscale",
        text.replace(f'"memscale_{name}": 1', f'"memscale_{name}": 2'): new,
    }
    for wrong, message in refused.items():
        with pytest.raises(error, match=message):
            kind.from_json(wrong)


@pytest.mark.parametrize("name", ["hardware", "profile", "prediction"])
def test_a_part_too_few_is_named(name):
    kind, make = MAKERS[name]
    fields = json.loads(make().to_json())
    lost = list(fields)[-1]
    del fields[lost]
    with pytest.raises(ms.ConfigError, match=f"the {name} has missing or unknown parts: .*{lost}"):
        kind.from_json(json.dumps(fields))
