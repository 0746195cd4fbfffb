import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentbench_kv.adapters.micro.generate import CURRICULUM
from agentbench_kv.training.micro.data import Mix, RowEncoder, episode_row
from agentbench_kv.training.micro.evaluate import evaluate
from agentbench_kv.training.micro.model import MicroConfig, MicroModel, load_model
from agentbench_kv.training.micro.tokenizer import build_tokenizer
from agentbench_kv.training.micro.train import (
    RECIPE,
    CurriculumStage,
    Muon,
    Trainer,
    TrainingOptions,
)

TINY = MicroConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16)
STAGES = (
    CurriculumStage("drills", (Mix(48, 2, CURRICULUM[:1], drills=1.0),), 300),
    CurriculumStage(
        "end", (Mix(64, 2, CURRICULUM[:1], auxiliary=0.2, gaps=0.5),), 600, rates=(1.0, 0.0)
    ),
)


def trained(out, steps=None):
    trainer = Trainer(TrainingOptions(out, seed=3, log_every=2, save_every=4), STAGES, TINY)
    trainer.run(steps)
    return trainer


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    whole = trained(tmp_path / "whole")
    assert whole.done
    trained(tmp_path / "cut", steps=6)
    resumed = Trainer(
        TrainingOptions(tmp_path / "cut", seed=3, log_every=2, save_every=4), STAGES, TINY
    )
    resumed.resume()
    assert resumed.progress.step == 4
    resumed.run()
    assert resumed.progress.tokens == whole.progress.tokens
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())


def test_seeds_differ(tmp_path):
    one = Trainer(TrainingOptions(tmp_path, seed=0), STAGES, TINY)
    two = Trainer(TrainingOptions(tmp_path, seed=1), STAGES, TINY)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights(one)[name], weights(two)[name])


def test_the_curve_is_logged(tmp_path):
    trained(tmp_path)
    entries = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [entry["event"] for entry in entries if "event" in entry] == ["drills done", "end done"]
    assert all(entry["tokens"] > 0 and entry["loss"] > 0 for entry in entries)


def test_learning_rate_falls_with_tokens(tmp_path):
    trainer = Trainer(TrainingOptions(tmp_path), STAGES, TINY)
    trainer.progress.step, trainer.progress.stage = 1000, 1
    trainer.progress.stage_tokens = 150
    assert trainer._factor() == pytest.approx(0.75)
    trainer.progress.stage = 0
    assert trainer._factor() == 1.0


def test_the_recipe_ends_at_rate_zero():
    assert RECIPE[0].rates == (1.0, 1.0)
    assert RECIPE[-1].rates[1] == 0.0


def test_hugging_face_computes_the_same_logits(tmp_path):
    trainer = trained(tmp_path, steps=2)
    trainer.save()
    folder = tmp_path / "model"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, 600, (2, 40))
    positions = torch.arange(40).expand(2, -1) * 3
    with torch.no_grad():
        expected = theirs(input_ids=ids, position_ids=positions).logits
        torch.testing.assert_close(
            load_model(folder)(ids, positions), expected, rtol=1e-4, atol=1e-4
        )
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert theirs.generation_config.eos_token_id == 2


def test_muon_brings_all_directions_to_one_length():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(8, 16))
    weight.grad = torch.randn(8, 16) @ torch.diag(torch.logspace(0, -1, 16))
    Muon([weight], lr=1.0, weight_decay=0.0).step()
    values = torch.linalg.svdvals(weight.detach())
    assert values.max() / values.min() < 3


def test_a_narrow_window_is_narrow():
    model = MicroModel(TINY)
    ids = torch.randint(0, 600, (1, 64))
    other = ids.clone()
    other[0, 10] = (other[0, 10] + 1) % 600
    positions = torch.arange(64)[None]
    distance = torch.arange(64)[:, None] - torch.arange(64)
    mask = (distance >= 0) & (distance < 4)
    with torch.no_grad():
        one, two = (model(x, positions, mask)[0, -1] for x in (ids, other))
    torch.testing.assert_close(one, two)


def test_an_untrained_model_fails_everything():
    row = episode_row(RowEncoder(build_tokenizer()), 0, CURRICULUM[0])
    report = evaluate(MicroModel(TINY), [row])
    assert (report.episodes, report.exact) == (1, 0)
    assert max(report.recall.values()) < 0.5
