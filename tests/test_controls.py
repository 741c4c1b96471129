"""Controls at evaluation, and what is looked at in attention: our decoders and Hugging Face models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_statistics import assert_dense
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MptConfig,
)
from variants import TRAIN_LENGTH, Variant, all_variants, draw_ids, in_pieces

from pe_study import attention
from pe_study.checkpoints import cache_name, open_checkpoint, resolved_kernel
from pe_study.errors import PlanError, RescaleError
from pe_study.evaluators import controls, diagnostics
from pe_study.evaluators.scoring import Scorer
from pe_study.evaluators.subjects import checkpoint_subject
from pe_study.kernels.statistics import Bins
from pe_study.loading import hf_attention
from pe_study.plan import Plan

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
WINDOW = 5


def saved(config, folder):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def llama(tmp_path):
    return saved(LlamaConfig(**SIZES), tmp_path / "llama")


def under(model, control):
    controls.put(model, control)
    return model


@pytest.mark.parametrize("variant", all_variants(), ids=str)
@torch.no_grad()
def test_a_window_hides_what_lies_farther_back(variant: Variant) -> None:
    """One layer: logits of a token are those of its last W tokens alone; in every kernel, also in pieces."""
    length, outs = 2 * TRAIN_LENGTH, []
    for kernel in ("eager", "sdpa"):
        model = variant.model(length=length, num_layers=1, kernel=kernel)
        ids = draw_ids(2, length)
        changed = ids.clone()
        changed[:, : length - WINDOW] = (ids[:, : length - WINDOW] + 1) % 61
        if model.max_length is not None and model.max_length < length:
            return
        plain = model(ids).logits
        under(model, f"attention_window={WINDOW}")
        outs.append(model(ids).logits)
        assert torch.equal(outs[-1][:, -1], model(changed).logits[:, -1])
        assert torch.equal(outs[-1][:, :WINDOW], plain[:, :WINDOW]) or kernel == "sdpa"
        assert (outs[-1] - plain)[:, -1].abs().max() > 1e-2
        assert (in_pieces(model, ids, (7, 1, 13)) - outs[-1]).abs().max() < 1e-4
        under(model, "none")
        assert torch.equal(model(ids).logits, plain)
        under(model, f"attention_window={length}")
        assert (model(ids).logits - plain).abs().max() < 1e-4
    assert (outs[0] - outs[1]).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["rope", "t5", "shaw", "nope"])
@torch.no_grad()
def test_a_window_in_the_chunked_kernels_is_that_of_eager(name: str) -> None:
    """Past 256 keys, where chunks skip far keys; a window inside and outside the band of the biases."""
    ids = draw_ids(1, 600)
    for window in (3, 300):
        found = [
            under(Variant(name).model(length=600, kernel=kernel), f"attention_window={window}")(ids).logits
            for kernel in ("eager", "sdpa")
        ]
        assert (found[0] - found[1]).abs().max() < 1e-4


def test_chunks_skip_the_keys_that_a_window_hides() -> None:
    """Work follows the window: case of 16 chunks, none holds more than its own and W - 1 keys."""
    from pe_study.kernels.blocks import Layout, chunks

    seen = chunks(1024, 1024, Layout(1.0, 0, 0, 64, reach=32))
    assert max(chunk.num_keys for chunk in seen) == 64 + 32 - 1
    assert [chunk.num_keys for chunk in chunks(1024, 1024, Layout(1.0, 0, 0, 512))] == [512, 1024]


@pytest.mark.parametrize("name", ["rope", "alibi", "shaw", "learned"])
@torch.no_grad()
def test_shuffled_positions_move_positions_and_nothing_else(name: str) -> None:
    """The same as position_ids given by hand; at once and in chunks; one permutation for each text."""
    model = Variant(name).model(length=TRAIN_LENGTH)
    ids = draw_ids(2, TRAIN_LENGTH)
    targets = draw_ids(2, TRAIN_LENGTH, seed=4)
    under(model, controls.SHUFFLE)
    chosen = controls.positions(model, ids)
    assert chosen is not None
    assert torch.equal(chosen.sort(-1).values, torch.arange(TRAIN_LENGTH).expand(2, -1))
    assert not torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[1:], controls.positions(model, ids[1:]))
    found = Scorer(model).nll(ids.numpy(), targets.numpy())
    in_chunks = Scorer(model, max_logits=2 * 61 * 8)._chunked(ids, targets, 5).numpy()
    under(model, "none")
    logits = model(ids, position_ids=chosen).logits.double().log_softmax(-1)
    expected = -logits.gather(-1, targets[..., None])[..., 0].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(in_chunks, expected, atol=1e-4)
    assert np.abs(found - Scorer(model).nll(ids.numpy(), targets.numpy())).max() > 1e-2


@torch.no_grad()
def test_shuffling_positions_does_nothing_where_there_are_none() -> None:
    model, ids = Variant("nope").model(), draw_ids(2, TRAIN_LENGTH)
    plain = Scorer(model).nll(ids.numpy(), ids.numpy())
    shuffled = Scorer(under(model, controls.SHUFFLE)).nll(ids.numpy(), ids.numpy())
    np.testing.assert_allclose(shuffled, plain, atol=1e-6)


@pytest.mark.parametrize("control", ["none", f"attention_window={WINDOW}", controls.SHUFFLE])
@torch.no_grad()
def test_the_kernel_that_is_told_is_the_one_that_runs(control, monkeypatch) -> None:
    """Layers and rows ask for it alike, whatever a control changes of mask and positions."""
    model, ids, asked = Variant("alibi").model(), draw_ids(1, TRAIN_LENGTH), []
    resolve = attention.resolve

    def spy(kernel, device, dtype, encoding, mask_kind, *, consecutive=True):
        asked.append((kernel, device, dtype, mask_kind, consecutive))
        return resolve(kernel, device, dtype, encoding, mask_kind, consecutive=consecutive)

    monkeypatch.setattr(attention, "resolve", spy)
    Scorer(under(model, control)).nll(ids.numpy(), ids.numpy())
    ran = set(asked)
    asked.clear()
    controls.resolved_kernel(model, control)
    assert set(asked) == ran and len(ran) == 1


def test_under_shuffled_positions_slopes_are_not_those_of_flash_attn(tmp_path, monkeypatch) -> None:
    """Told and refused before anything runs; kernels that add no bias run under any positions."""
    monkeypatch.setattr(attention, "flash_attn_func", lambda: attention.flash)
    cuda, half = torch.device("cuda"), torch.bfloat16
    model = Variant("alibi").model()
    assert model.resolved_kernel(cuda, dtype=half) == "flash"
    assert model.resolved_kernel(cuda, dtype=half, consecutive=False) == "flex"
    for name in ("alibi", "rope"):
        Variant(name).model().save_pretrained(tmp_path / name)
        subject = checkpoint_subject(str(tmp_path / name), {"dtype": "bfloat16"})
        subject.checkpoint.check_kernel("flash", cuda)
        controls.check(subject, controls.SHUFFLE, "auto", cuda)
        if name == "rope":
            controls.check(subject, controls.SHUFFLE, "flash", cuda)
            continue
        with pytest.raises(PlanError, match=r"^shuffle_positions: kernel flash cannot run ALiBi[^\n]*$"):
            controls.check(subject, controls.SHUFFLE, "flash", cuda)


def after(model, ids, start):
    """Logits of the tokens from `start` on, those before them read into the cache."""
    name = cache_name(model)
    first = model(ids[:, :start], use_cache=True)
    return model(ids[:, start:], use_cache=True, **{name: getattr(first, name)}).logits


def eager_weights(model, ids, change):
    """Logits of a two-layer Llama whose scores are changed by hand: its eager function, rewritten."""
    from transformers.models.llama import modeling_llama

    def by_hand(module, q, k, v, mask, scaling, **options):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        length = q.shape[2]
        scores = change((q.double() @ k.double().mT) * scaling)
        hidden = torch.ones(length, length).triu(1).bool()
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return (weights @ v.double()).float().transpose(1, 2), None

    own = modeling_llama.eager_attention_forward
    modeling_llama.eager_attention_forward = by_hand
    try:
        model.set_attn_implementation("eager")
        return model(ids, use_cache=False).logits
    finally:
        modeling_llama.eager_attention_forward = own


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@torch.no_grad()
def test_logn_on_a_checkpoint_is_its_formula(llama, kernel) -> None:
    """And none up to the original length bit for bit; at once and through the cache; with a rescale."""
    ids = draw_ids(2, 40)
    plain = open_checkpoint(llama).load("yarn:4", 40, kernel)
    scaled = open_checkpoint(llama).load("yarn:4+logn", 40, kernel)
    assert resolved_kernel(scaled) == resolved_kernel(plain) == kernel
    assert torch.equal(scaled(ids[:, :16]).logits, plain(ids[:, :16]).logits)
    factor = torch.from_numpy(np.maximum(1, np.log(np.arange(1, 41)) / np.log(16)))[:, None]
    found = scaled(ids).logits
    assert (after(scaled, ids, 21) - found[:, 21:]).abs().max() < 1e-4
    expected = eager_weights(open_checkpoint(llama).load("yarn:4", 40, "eager"), ids, lambda x: x * factor)
    assert (found - expected).abs().max() < 1e-3
    assert (found - plain(ids).logits).abs().max() > 1e-2


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@torch.no_grad()
def test_a_window_on_a_checkpoint_is_its_formula(llama, kernel, monkeypatch) -> None:
    monkeypatch.setattr(hf_attention, "ROWS", 7)
    ids = draw_ids(2, 40)
    model = open_checkpoint(llama).load("none", 40, kernel)
    plain = model(ids).logits
    found = under(model, f"attention_window={WINDOW}")(ids).logits
    far = torch.arange(40)[:, None] - torch.arange(40) >= WINDOW
    by_hand = open_checkpoint(llama).load("none", 40, "eager")
    expected = eager_weights(by_hand, ids, lambda x: x.masked_fill(far, -math.inf))
    assert (found - expected).abs().max() < 1e-3
    assert (after(model, ids, 21) - found[:, 21:]).abs().max() < 1e-4
    assert torch.equal(under(model, "none")(ids).logits, plain)


@torch.no_grad()
def test_shuffled_positions_on_a_checkpoint(llama) -> None:
    """Positions that jump back are no packed documents: every token still sees all before it."""
    model, ids = open_checkpoint(llama).load("none", 24), draw_ids(2, 24)
    under(model, controls.SHUFFLE)
    chosen = controls.positions(model, ids)
    found = Scorer(model).nll(ids.numpy(), ids.numpy())
    in_chunks = Scorer(model)._chunked(ids, ids, 5).numpy()
    ones = torch.ones_like(ids)
    logits = model(ids, position_ids=chosen, attention_mask=ones).logits.double().log_softmax(-1)
    expected = -logits.gather(-1, ids[..., None])[..., 0].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(in_chunks, expected, atol=1e-4)


CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=6),
    "gemma2": Gemma2Config(**SIZES, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=8),
    "gpt2": GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, pad_token_id=0),
}


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_checkpoint_is_measured_as_it_attends(name, tmp_path) -> None:
    """Grouped queries, sliding windows, soft caps: against the weights that eager attention returns."""
    folder, length = saved(CONFIGS[name], tmp_path / name), 40
    ids, bins = draw_ids(1, length), Bins(length, 16)
    kernel = "eager" if name == "gemma2" else "auto"
    model = open_checkpoint(folder).load("none", length, kernel)
    before = model(ids).logits
    layers = diagnostics.collect(model, [ids[0].numpy()], bins)
    assert torch.equal(model(ids).logits, before)
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    weights = eager(ids, output_attentions=True).attentions
    assert sorted(layers) == [0, 1]
    for layer, weights_BHTS in enumerate(weights):
        seen = weights_BHTS[0, 0] > 0
        assert seen.sum() < length * (length + 1) / 2 or name in ("llama", "gpt2") or layer == 1
        scores = weights_BHTS[0].double().log()
        sums = layers[layer]
        sums.max_score_PH = _tops(scores, seen, bins)  # weights do not tell a constant of a query's scores
        assert_dense(sums, scores, seen, bins)


def _tops(scores: torch.Tensor, seen: torch.Tensor, bins: Bins) -> torch.Tensor:
    shown = scores.masked_fill(~seen, -math.inf)
    rows = [[t for t in range(bins.length) if 1 << b <= t + 1 < 2 << b] for b in range(bins.num_positions)]
    return torch.stack([shown[:, row].amax((1, 2)) for row in rows])


@torch.no_grad()
def test_the_largest_score_of_a_checkpoint_is_scaled_and_capped(tmp_path) -> None:
    folder = saved(CONFIGS["gemma2"], tmp_path / "gemma2")
    model = open_checkpoint(folder).load("none", 40, "eager")
    layers = diagnostics.collect(model, [draw_ids(1, 40)[0].numpy()], Bins(40, 16))
    tops = torch.stack([sums.max_score_PH for sums in layers.values()])
    assert 0.5 < tops.max() <= 2.0


@pytest.mark.parametrize("config", [MptConfig(d_model=32, n_layers=1, n_heads=2), FalconConfig(alibi=False)])
def test_what_a_checkpoint_cannot_take_is_refused_in_one_line(config, tmp_path) -> None:
    config.save_pretrained(tmp_path)
    subject = checkpoint_subject(str(tmp_path), {})
    for refuse in (
        lambda: controls.check(subject, "attention_window=8", "auto", None),
        lambda: diagnostics.check(subject, "auto"),
    ):
        with pytest.raises(PlanError, match=r"^[^\n]*AttentionInterface$"):
            refuse()
    if config.model_type == "mpt":
        with pytest.raises(PlanError, match="takes no positions"):
            controls.check(subject, controls.SHUFFLE, "auto", None)
    assert not subject.checkpoint.takes("logn")
    assert subject.checkpoint.takes("none")


def test_kernels_that_cannot_hide_more_are_refused(llama) -> None:
    subject = checkpoint_subject(str(llama), {})
    with pytest.raises(PlanError, match="attention_window: found kernel flex; accepted: eager, sdpa"):
        controls.check(subject, "attention_window=8", "flex", None)
    with pytest.raises(PlanError, match=r"diagnostics: .*kernel flex: .*accepted: sdpa, eager"):
        diagnostics.check(subject, "flex")
    with pytest.raises(RescaleError, match=r"rescale yarn:2\+logn: kernel flex: .*accepted: sdpa, eager"):
        subject.checkpoint.check_kernel("flex", rescales=["none", "yarn:2+logn"])
    subject.checkpoint.check_kernel("flex", rescales=["none", "yarn:2"])
    assert subject.checkpoint.takes("yarn:2+logn")


def test_logn_needs_a_training_length(llama) -> None:
    model = open_checkpoint(llama).load("none", 16)
    with pytest.raises(RescaleError, match="at which length"):
        hf_attention.add_logn(model, "logn", None)


def test_controls_of_a_plan() -> None:
    plan = Plan(attention_window="0.5x", shuffle_positions=True, lengths=["1x"]).resolve(512)
    assert controls.asked(plan) == ("attention_window=256", "shuffle_positions")
    assert controls.asked(Plan().resolve(512)) == ()
