"""The page of the documentation about this, made of the closed lists, so that neither says what the other does not."""

from __future__ import annotations

import json
from collections.abc import Sequence

from memscale.telemetry.counters import CALLS, COMMANDS, DIMENSIONS
from memscale.telemetry.schema import MOST, SCHEMA, schema

_TEXT = """# Telemetry

It is off. No file is made, no clock is read and no connection is opened, unless you say otherwise on this machine:

```console
$ memscale telemetry local                                    # count calls in files of mine, and never send them
$ memscale telemetry on --endpoint https://memory.example.org # and let `memscale telemetry send` post them there
$ memscale telemetry off                                      # stop; `clean` removes what was counted, too
```

There is no endpoint but the one that you give, so that nothing can leave by mistake. The library itself never sends:
it has no socket, no thread, and nothing that runs at exit. `send` is a command that you, or your scheduler, run.

| command | |
|---|---|
| `memscale telemetry` | what holds, what decided it, and where the files are |
| `memscale telemetry show` | the exact bytes that `send` would send; `--week 2026-W47` is one week, as it is so far |
| `memscale telemetry send` | posts the weeks that are over, once each, in 3 seconds; with `--dry-run` it only says so |

`send` keeps a copy of what it sent, follows no redirect, and goes by no proxy. What was counted before you said `on`
is never sent, and neither is the week that is not over. When the schema below has a new version, `on` falls back to
`local` until you say it again.

`DO_NOT_TRACK`, `HF_HUB_OFFLINE`, `CI` (and what other builders set) and a run of pytest switch it off, whatever you
chose; `MEMSCALE_TELEMETRY=off` and `=local` lower it for one process. No variable can switch it on: an image cannot
agree for its users.

```python
from memscale.telemetry import consent

print(consent().state)
```

## What is counted

A line for a call, in a file for a week, at most 64 lines in a process; nothing in a training step, in a worker of a
DataLoader or one that was forked, or in a process of a higher rank. The calls are {calls}. The commands are
{commands}. Each call is divided in these ways, one at a time: no two are ever
counted together, so that no row is one person's.

| | buckets | question | what hangs on it |
|---|---|---|---|
{dimensions}

A report has no identity, no time but the week, no count above {most} (more is {most}), and no name, path, shape,
message or value of yours: every string that can be in it is in the schema, and anything else fails it.

## The schema, version {version}

```json
{schema}
```
"""


def page(cards: Sequence[str]) -> str:
    """The page, as Markdown.

    >>> page(["h100"]).splitlines()[0]
    '# Telemetry'

    Args:
        cards: as in `schema`.
    """
    rows = [
        f"| {each.name} | {' '.join(f'`{bucket}`' for bucket in each.buckets)} | {each.question} | {each.decision} |"
        for each in DIMENSIONS
    ]
    return _TEXT.format(
        calls=", ".join(f"`{name}`" for name in CALLS),
        commands=", ".join(f"`{name}`" for name in COMMANDS),
        dimensions="\n".join(rows),
        most=MOST,
        version=SCHEMA,
        schema=json.dumps(schema(tuple(cards)), indent=1),
    )
