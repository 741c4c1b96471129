"""Models whose calls take what changes nothing in them, or whose attention holds more than is measured."""

from __future__ import annotations

import pytest
from test_controls import SIZES, saved
from transformers import (
    FalconConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    SmolLM3Config,
    Zamba2Config,
)

from pe_study.errors import PlanError, RescaleError
from pe_study.evaluators import controls, diagnostics
from pe_study.evaluators.subjects import checkpoint_subject
from pe_study.loading import hf_rope

FALCON = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
SWITCHED_OFF = {
    "falcon": FalconConfig(**FALCON, alibi=True),
    "granitemoehybrid": GraniteMoeHybridConfig(),
    "zamba2": Zamba2Config(use_mem_rope=False),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[0, 0]),
}
SWITCHED_ON = {
    "falcon": FalconConfig(**FALCON, alibi=False),
    "granitemoehybrid": GraniteMoeHybridConfig(position_embedding_type="rope"),
    "zamba2": Zamba2Config(use_mem_rope=True),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
}


@pytest.mark.parametrize("name", SWITCHED_OFF)
def test_rope_that_a_config_switches_off_is_not_there(name, tmp_path) -> None:
    """All hold rope parameters, and their calls take positions: no control or rescale of them is measured."""
    assert SWITCHED_OFF[name].rope_parameters
    assert hf_rope.rotary(SWITCHED_ON[name]) is not None
    SWITCHED_OFF[name].save_pretrained(tmp_path)
    subject = checkpoint_subject(str(tmp_path), {})
    assert subject.checkpoint.rotary is None
    assert not subject.checkpoint.takes("linear:2")
    with pytest.raises(PlanError, match=r"^shuffle_positions: [^\n]* takes no positions from outside; leave"):
        controls.check(subject, controls.SHUFFLE, "auto", None)
    with pytest.raises(RescaleError, match=r"has no rotary positions to rescale \(use none\)$"):
        hf_rope.apply(SWITCHED_OFF[name], "yarn:2", 64)


@pytest.mark.parametrize("name", ["falcon", "smollm3"])
def test_positions_that_change_nothing_are_found_without_a_list_of_names(name, tmp_path, monkeypatch) -> None:
    """As for a kind that nobody knows here: the loaded model itself is asked."""
    monkeypatch.setattr(hf_rope, "is_switched_off", lambda config: False)
    for number, config in enumerate((SWITCHED_OFF[name], SWITCHED_ON[name])):
        subject = checkpoint_subject(str(saved(config, tmp_path / str(number))), {})
        controls.check(subject, controls.SHUFFLE, "auto", None)
        model = subject.checkpoint.load("none", 16)
        if config is SWITCHED_ON[name]:
            controls.check_effect(subject, model)
            subject.checkpoint.load("linear:2", 16)
            continue
        with pytest.raises(PlanError, match=r"^shuffle_positions: [^\n]* takes no positions from outside"):
            controls.check_effect(subject, model)
        with pytest.raises(RescaleError, match=r"^rescale linear:2: [^\n]*: no position changes what"):
            subject.checkpoint.load("linear:2", 16)


def test_scores_that_are_not_told_are_refused_before_work_starts(tmp_path) -> None:
    """Sinks of GPT-OSS; where a model goes through the interface and uses none, nothing is refused."""
    sizes = SIZES | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    GptOssConfig(**sizes).save_pretrained(tmp_path / "sinks")
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "llama")
    diagnostics.check(checkpoint_subject(str(tmp_path / "llama"), {}), "auto")
    said = r"^diagnostics: [^\n]*sinks: the attention of gpt_oss uses s_aux, which is not measured; leave"
    with pytest.raises(PlanError, match=said):
        diagnostics.check(checkpoint_subject(str(tmp_path / "sinks"), {}), "auto")
