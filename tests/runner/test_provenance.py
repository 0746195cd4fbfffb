"""Which accelerator a run says that it had."""

from __future__ import annotations

import pytest
import torch

from agentbench_kv.run.provenance import environment


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("auto", "small"),
        ("cuda", "small"),
        ("cuda:1", "large"),
        ("cuda:2", None),  # the engine refuses it
        ("cpu", "small"),  # of the machine, as before
    ],
)
def test_the_gpu_is_the_one_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, device: str, name: str | None
) -> None:
    gpus = ["small", "large"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_name", gpus.__getitem__)
    monkeypatch.setattr("agentbench_kv.run.provenance.kernels", lambda: "triton")
    assert environment(device)["hardware"]["gpu"] == name


def test_without_a_gpu_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment("cuda:1")["hardware"]["gpu"] is None
