"""When results of a micro session are last needed, against what its texts say."""

from __future__ import annotations

import pytest

from agentbench_kv.adapters.micro.episode import Episode, ExpectedCall, last_uses
from agentbench_kv.adapters.micro.generate import (
    ACT,
    HANDLE,
    PROFILES,
    READING,
    THINK,
    generate,
    held_out_seed,
)

PLACES = tuple[int, int]


def read(episode: Episode) -> tuple[list[PLACES], list[list[PLACES]]]:
    """Return each result's own place, and the places of all messages that need it.

    From texts alone: a message needs the results that hold a handle it writes, and where it is the
    first to write a tag or plan, whose code is half of a reading, the result with the last reading.
    """
    own: list[PLACES] = []
    needs: list[list[PLACES]] = []
    texts: list[str] = []
    written: set[str] = set()
    for turn, asked in enumerate(episode.turns):
        for number, message in enumerate((*asked.calls, asked.reply)):
            for name, separator, code in HANDLE.findall(message.raw):
                handle = f"{name}{separator}{code}"
                if separator in (ACT, THINK) and handle not in written:
                    if texts:
                        (now,) = [h for h in HANDLE.findall(texts[-1]) if h[:2] == ("now", READING)]
                        assert code.startswith(now[2][:2]) or code.endswith(now[2][2:])
                        needs[-1].append((turn, number))
                elif handle not in written or separator not in (ACT, THINK):
                    for at, text in enumerate(texts):
                        if handle in {"".join(each) for each in HANDLE.findall(text)}:
                            needs[at].append((turn, number))
                written.add(handle)
            if isinstance(message, ExpectedCall):
                own.append((turn, number))
                needs.append([])
                texts.append(message.result_json(len(texts)))
    return own, needs


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_last_uses_are_what_the_texts_say(profile: str) -> None:
    for index in range(40):
        episode = generate(held_out_seed(index), PROFILES[profile])
        uses = last_uses(episode)
        assert [len(own) for own in uses] == [len(turn.calls) for turn in episode.turns]
        own, needs = read(episode)
        expected = [max(needed, default=place) for place, needed in zip(own, needs, strict=True)]
        assert [last for turn in uses for last in turn] == expected


def test_some_results_are_needed_long_after_and_some_never() -> None:
    episode = generate(held_out_seed(0), PROFILES["recall-5k"])
    lags = [last[0] - turn for turn, own in enumerate(last_uses(episode)) for last in own]
    assert max(lags) > 5
    assert lags.count(0) > 5
    own, _ = read(episode)
    flat = [last for turn in last_uses(episode) for last in turn]
    assert any(last == place for last, place in zip(flat, own, strict=True))
