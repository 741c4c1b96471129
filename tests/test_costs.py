"""Costs from dimensions: the worked examples, and what the model itself counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pe_study import costs, recipe
from pe_study.commands import forecast


def test_kv_cache_of_the_worked_example() -> None:
    """64 heads of 128, 4096 tokens, 2 bytes: 128 MiB a layer, 10.7 GB in 80 layers; 8 heads: an eighth."""
    size = {"head_dim": 128, "length": 4096, "bytes_per_element": 2}
    assert costs.kv_cache_bytes(num_kv_heads=64, **size) == 134_217_728
    assert round(costs.kv_cache_bytes(num_kv_heads=64, num_layers=80, **size) / 1e9, 1) == 10.7
    grouped = costs.kv_cache_bytes(num_kv_heads=8, **size)
    assert grouped / costs.kv_cache_bytes(num_kv_heads=64, **size) == 0.125


def test_score_matrix_of_the_worked_example() -> None:
    assert costs.score_matrix_entries(4096) == 16_777_216
    assert costs.score_matrix_entries(128_000) == 16_384_000_000
    whole = costs.attention_bytes(num_heads=1, num_queries=4096, length=4096, bytes_per_element=1)
    assert whole == costs.score_matrix_entries(4096)


def test_operations_count_six_a_parameter_and_the_causal_half() -> None:
    """A causal chunk of two tokens has 3 scores: 4 * D multiply-adds * 3 forward, three passes in all."""
    operations = costs.training_operations(
        num_parameters=0, num_layers=1, d_model=8, length=1000, num_tokens=1000
    )
    exact = 3 * sum(4 * 8 * keys for keys in range(1, 1001))
    assert operations == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("name", ["nope", "learned", "shaw", "t5", "rope"])
@pytest.mark.parametrize("qk_norm", ["true", "false"])
def test_parameters_are_those_of_the_model(tmp_path: Path, name: str, qk_norm: str) -> None:
    """The arithmetic of a dry run equals the count of a built model, decoder and encoding apart."""
    import torch

    from pe_study.model import PEStudyConfig, PEStudyForCausalLM

    path = tmp_path / "r.yaml"
    path.write_text(
        f"name: r\nencodings: [{name}]\n"
        f"model: {{num_layers: 3, d_model: 24, num_heads: 4, num_kv_heads: 2, d_ff: 40, max_positions: 32, "
        f"qk_norm: {qk_norm}}}\n"
        "train: {length: 16, batch_tokens: 16, steps: 1, lr: 1e-3}\n",
        encoding="utf-8",
    )
    loaded = recipe.load(path)
    spec = loaded.encodings[0]
    with torch.device("meta"):
        model = PEStudyForCausalLM(
            PEStudyConfig(
                vocab_size=257,
                **{key: value for key, value in loaded.model if key != "dropout"},
                encoding={"name": spec.name, **spec.options},
                train_length=16,
            )
        )
    decoder = forecast.decoder_parameters(loaded.model, forecast.vocabulary(loaded.data))
    assert decoder + forecast.position_parameters(loaded, spec) == model.num_parameters()
    assert forecast.position_parameters(loaded, spec) == sum(
        p.numel() for _, p in model.position_parameters()
    )


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0 s"), (119, "119 s"), (121, "2 min"), (7200, "2 h"), (1e6, "12 days")]
)
def test_durations_are_read_at_a_glance(seconds: float, said: str) -> None:
    assert forecast._duration(seconds) == said
