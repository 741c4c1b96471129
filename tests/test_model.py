"""The decoder: its weights, its loss, its masks, what it saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import StaticCache
from variants import TRAIN_LENGTH, VOCABULARY, Variant, draw_ids

from pe_study import encodings
from pe_study.encodings.base import At, Encoding
from pe_study.kernels.scoring import Mask
from pe_study.model import PEStudyForCausalLM, next_token_loss
from pe_study.placing import place

NAMES = encodings.available()


def test_shared_weights_are_bit_equal_across_encodings() -> None:
    """case 48, extended: for one seed every weight that two encodings share is the same at step 0."""
    plain = Variant("nope").model().state_dict()
    for name in NAMES:
        state = Variant(name).model().state_dict()
        assert plain.keys() <= state.keys()
        for key, weight in plain.items():
            assert torch.equal(state[key], weight), (name, key)
    other = Variant("nope").model(seed=1).state_dict()
    assert not torch.equal(other["embedding.weight"], plain["embedding.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_weights_have_the_recipes_standard_deviation(name: str) -> None:
    model = Variant(name).model(d_model=64, d_ff=192, initializer_range=0.02)
    for key, parameter in model.named_parameters():
        if parameter.ndim >= 2 and parameter.numel() > 2000:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), key
        if "norm" in key:
            assert bool((parameter == 1).all())


@torch.no_grad()
def test_a_tied_head_survives_the_round_trip(tmp_path: Path) -> None:
    """case 46: logits equal, still one tensor, counted once."""
    model = Variant("rope").model()
    counted = sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, PEStudyForCausalLM)
    assert loaded.lm_head.weight is loaded.embedding.weight
    assert sum(p.numel() for p in loaded.parameters()) == counted
    ids = draw_ids(2, TRAIN_LENGTH)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@torch.no_grad()
def test_labels_are_shifted_once() -> None:
    """case 10: our loss is CE(logits[:, :-1], ids[:, 1:]); already shifted labels give the same."""
    model, ids = Variant("rope").model(), draw_ids(2, TRAIN_LENGTH)
    logits = model(ids).logits
    manual = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert model(ids, labels=ids).loss.item() == pytest.approx(manual.item(), abs=1e-6)
    shifted = model(ids[:, :-1], shift_labels=ids[:, 1:]).loss
    assert shifted.item() == pytest.approx(manual.item(), abs=1e-6)


def test_loss_divides_by_the_tokens_it_is_told() -> None:
    """case 14, of our kind: a sum over targets over the global count; -100 counts nowhere."""
    logits, targets = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    targets[0, :3] = -100
    mean, tenth = next_token_loss(logits, targets, None), next_token_loss(logits, targets, 10)
    assert tenth.item() == pytest.approx(mean.item() * 7 / 10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loss_is_summed_in_float32(dtype: torch.dtype) -> None:
    """case 58: zero logits over 32000 symbols: 10.373491; float16 sums would be infinite."""
    logits = torch.zeros(1, 4096, 32000, dtype=dtype)
    loss = next_token_loss(logits[:, :64], torch.zeros(1, 64, dtype=torch.long), None)
    assert loss.item() == pytest.approx(10.373491, abs=1e-6)
    total = next_token_loss(logits[:, :8], torch.zeros(1, 8, dtype=torch.long), 1)
    assert total.item() == pytest.approx(8 * 10.373491, rel=1e-6)


@torch.no_grad()
def test_logits_to_keep() -> None:
    """case 59, of our kind: the head runs on the kept positions alone."""
    model, ids = Variant("t5").model(), draw_ids(2, TRAIN_LENGTH)
    full = model(ids).logits
    assert model(ids, logits_to_keep=3).logits.shape == (2, 3, VOCABULARY)
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, full[:, -3:])
    kept = torch.tensor([2, 5])
    torch.testing.assert_close(model(ids, logits_to_keep=kept).logits, full[:, kept])


@pytest.mark.parametrize("name", ["rope", "t5", "alibi", "shaw"])
@torch.no_grad()
def test_a_preallocated_cache_hides_its_empty_end(name: str) -> None:
    """StaticCache returns keys for positions not read yet; nothing may attend to them."""
    model, ids = Variant(name).model(), draw_ids(1, 12)
    full = model(ids).logits
    cache = StaticCache(config=model.config, max_cache_len=TRAIN_LENGTH)
    parts = [
        model(ids[:, :7], past_key_values=cache).logits,
        model(ids[:, 7:8], past_key_values=cache).logits,
        model(ids[:, 8:], past_key_values=cache).logits,
    ]
    assert (torch.cat(parts, 1) - full).abs().max() < 1e-4


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    """case 47, of our kind: a table that all layers share gets the same gradient either way."""
    ids, grads = draw_ids(2, TRAIN_LENGTH), []
    for checkpointed in (False, True):
        model = Variant(name).model().train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        with torch.enable_grad():
            model(ids, labels=ids).loss.backward()
        grads.append({key: p.grad for key, p in model.named_parameters()})
    for key, plain in grads[0].items():
        torch.testing.assert_close(grads[1][key], plain, atol=1e-6, rtol=1e-5)


def test_positions_follow_the_mask() -> None:
    """Real tokens count from 0 on either side of padding, also around a hole; indices then lie."""
    x = torch.zeros(1, 5, 8)
    cases = {
        (1, 1, 1, 1, 1): ([0, 1, 2, 3, 4], True),
        (0, 0, 1, 1, 1): ([0, 0, 0, 1, 2], True),
        (1, 1, 1, 0, 0): ([0, 1, 2, 2, 2], True),
        (1, 1, 0, 0, 1): ([0, 1, 1, 1, 2], False),
    }
    for row, (positions, consecutive) in cases.items():
        at, mask = place(x, 0, 16, torch.tensor([row]), None, None)
        assert at.k_positions_BS[0].tolist() == positions
        assert at.consecutive == consecutive
        assert mask.kind == ("causal" if all(row) else "segments")


def test_contradictions_are_named() -> None:
    x, ids = torch.zeros(1, 5, 8), torch.arange(5)[None]
    with pytest.raises(ValueError, match="attention_mask covers 4 tokens"):
        place(x, 0, 16, torch.ones(1, 4), None, None)
    with pytest.raises(ValueError, match="segment_ids"):
        place(x, 3, 16, None, None, ids)
    with pytest.raises(ValueError, match="position_ids behind a cache"):
        place(x, 3, 16, None, ids, None)
    with pytest.raises(ValueError, match="position_ids go down to -1; accepted: 0"):
        place(x, 0, 16, None, ids - 1, None)
    at, _ = place(x, 0, 16, torch.tensor([[0, 1, 1, 1, 1]]), ids - 1, None)  # of padding they mean nothing
    assert at.k_positions_BS[0].tolist() == [0, 0, 1, 2, 3]
    with pytest.raises(ValueError, match="no token to read"):
        place(x[:, :0], 0, 16, None, None, None)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        Variant("nope").model()(None)


@torch.no_grad()
def test_restarting_positions_alone_do_not_separate_documents() -> None:
    """case 53: what isolates is the segment; positions that restart only move the tokens."""
    model = Variant("alibi").model()
    ids, changed = draw_ids(1, 16), draw_ids(1, 16, seed=4)
    changed[:, 8:] = ids[:, 8:]
    restart = torch.arange(8).repeat(2)[None]
    number = (torch.arange(16) >= 8).long()[None]
    leaking = [model(x, position_ids=restart).logits[:, 8:] for x in (ids, changed)]
    kept = [model(x, position_ids=restart, segment_ids=number).logits[:, 8:] for x in (ids, changed)]
    assert not torch.equal(*leaking)
    assert torch.equal(*kept)
    assert (kept[0] - model(ids[:, 8:]).logits).abs().max() < 1e-4


class _LayerWatcher(Encoding):
    """Writes down which layer asks."""

    def rotate(self, q: torch.Tensor, k: torch.Tensor, at: At) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(at.layer)
        return q, k


seen: list[int] = []


@torch.no_grad()
def test_hooks_are_told_their_layer() -> None:
    model = Variant("nope").model(num_layers=3)
    model.encoding = _LayerWatcher(model.encoding.dims)
    seen.clear()
    model(draw_ids(1, 4))
    assert seen == [0, 1, 2]
    assert Mask().kind == "causal"


def test_building_on_meta_draws_nothing() -> None:
    """What counts parameters without memory."""
    with torch.device("meta"):
        model = PEStudyForCausalLM(Variant("shaw").config())
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in Variant("shaw").model().parameters()
    )


@pytest.mark.parametrize("name", NAMES)
def test_parameter_groups_hold_every_parameter_once(name: str) -> None:
    model = Variant(name).model(qk_norm=True)
    groups = model.parameter_groups(weight_decay=0.1, lr_total=1.0, lr_mult=3.0)
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    by_name = {group["name"]: group for group in groups}
    position = by_name.get("position")
    assert (position is not None) == bool(model.position_parameters())
    if position is not None:
        assert (position["weight_decay"], position["lr_mult"]) == (0.0, 3.0)
    assert id(model.embedding.weight) in {id(p) for p in by_name["no_decay"]["params"]}


def test_an_encodings_vectors_are_drawn_like_its_matrices() -> None:
    """An inventor's `torch.empty(num_heads)` is not trained from what was in memory; norms stay ones."""
    models = [Variant("nope").model(), Variant("nope").model()]
    for model in models:
        model.encoding.register_parameter("rate", torch.nn.Parameter(torch.full((4,), torch.nan)))
        model.draw_weights()
    first, second = (model.encoding.rate for model in models)
    assert torch.equal(first, second)
    assert 0 < first.abs().max() < 5
    assert bool((models[0].layers[0].mlp_norm.weight == 1).all())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_compiled_equals_eager_at_growing_lengths(name: str) -> None:
    """case 60: lengths that grow do not compile again and again; results are those of the plain model."""
    from pe_study.kernels import fused

    model = Variant(name).model(length=64)
    fused.reset_compilations()
    compiled = torch.compile(model, dynamic=True)
    for length in (17, 24, 33, 40, 64):
        ids = draw_ids(2, length)
        found = compiled(ids, use_cache=False).logits
        assert (found - model(ids, use_cache=False).logits).abs().max() < 1e-4
    assert fused.compilations() == 1
    fused.reset_compilations()
