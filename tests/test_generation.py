"""Greedy continuation past the training length, and what a declared length refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from variants import TRAIN_LENGTH, Variant, all_rescaled, draw_ids

from pe_study.errors import LengthError
from pe_study.model import CACHE_FIELD, PEStudyForCausalLM

NEW = 2 * TRAIN_LENGTH


def by_hand(model: PEStudyForCausalLM, ids: Tensor, new: int) -> Tensor:
    """One full forward pass a token, no cache."""
    for _ in range(new):
        ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return ids


@pytest.mark.parametrize("variant", [Variant("rope"), *all_rescaled()], ids=str)
@torch.no_grad()
def test_generate_declares_prompt_and_new_tokens_first(variant: Variant) -> None:
    """With no declared length it is that of the whole sequence, from the first token on, and only then.

    case 19, case 43: a factor that changed on the way would leave keys turned by another base in the cache.
    """
    model, prompt = variant.model(), draw_ids(1, TRAIN_LENGTH - 2)
    before = model(prompt).logits
    found = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False
    )
    declared = variant.model(length=prompt.shape[1] + NEW)
    assert torch.equal(found, by_hand(declared, prompt, NEW))
    assert model.config.length is None
    assert torch.equal(model(prompt).logits, before)


@torch.no_grad()
def test_a_failed_generation_leaves_no_declared_length() -> None:
    (variant,) = [v for v in all_rescaled() if v.rescale.startswith("dynamic")]
    model = variant.model()

    def fail(*_: object) -> None:
        raise KeyError("no")

    model.embedding.register_forward_hook(fail)
    with pytest.raises(KeyError):
        model.generate(draw_ids(1, 8), max_new_tokens=40)
    assert model.config.length is None


@pytest.mark.parametrize("variant", all_rescaled(), ids=str)
@torch.no_grad()
def test_a_cache_never_crosses_its_declared_length(variant: Variant) -> None:
    """One line that says how to load the model instead."""
    model = variant.model(length=TRAIN_LENGTH)
    cache = model(draw_ids(1, TRAIN_LENGTH), use_cache=True)[CACHE_FIELD]
    with pytest.raises(
        LengthError, match=r"^17 tokens cross the declared length 16; load .*length=17"
    ) as caught:
        model(draw_ids(1, 1), past_key_values=cache)
    assert "\n" not in str(caught.value)
    assert cache.get_seq_length() == TRAIN_LENGTH
    with pytest.raises(LengthError):
        model.generate(draw_ids(1, TRAIN_LENGTH), max_new_tokens=1)


@torch.no_grad()
def test_without_a_declared_length_constants_are_those_of_training() -> None:
    """A rescale that follows the length refuses what it was not built for; a fixed one does not care."""
    ids = draw_ids(1, TRAIN_LENGTH + 1)
    with pytest.raises(LengthError, match="declared length 16"):
        Variant("rope", rescale="dynamic:2").model()(ids)
    Variant("rope", rescale="yarn:4").model()(ids)


@torch.no_grad()
def test_generation_from_a_saved_model(tmp_path: Path) -> None:
    """Loaded for a declared length, as a user does; prompts of unequal length, padded left."""
    Variant("rope").model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, length=64, rescale="yarn:auto")
    prompts = [draw_ids(1, n, seed=n) for n in (4, 9, 20)]
    batch, mask = torch.zeros(3, 20, dtype=torch.long), torch.zeros(3, 20, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        batch[row, 20 - prompt.shape[1] :], mask[row, 20 - prompt.shape[1] :] = prompt, 1
    together = model.generate(batch, attention_mask=mask, max_new_tokens=30, do_sample=False, pad_token_id=0)
    for row, prompt in enumerate(prompts):
        assert torch.equal(together[row, 20:], by_hand(model, prompt, 30)[0, prompt.shape[1] :])


@torch.no_grad()
def test_beams_reorder_the_cache() -> None:
    """Beam search with the cache is beam search without it."""
    model, prompt = Variant("t5").model(), draw_ids(2, 5)
    options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    cached = model.generate(prompt, attention_mask=mask, use_cache=True, **options)
    assert torch.equal(cached, model.generate(prompt, attention_mask=mask, use_cache=False, **options))


@pytest.mark.parametrize("rescale", ["dynamic:2", "yarn:auto"])
@torch.no_grad()
def test_a_filled_cache_keeps_its_declared_length(rescale: str) -> None:
    """case 19: a second generation declares another length, whose keys turn by another base."""
    model, prompt = Variant("rope", rescale=rescale).model(), draw_ids(1, TRAIN_LENGTH)
    options = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    with pytest.raises(LengthError, match="filled under the declared length"):
        model.generate(first.sequences, **{CACHE_FIELD: first[CACHE_FIELD]}, **options)
    model.declare(8 * TRAIN_LENGTH)
    first = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    again = model.generate(first.sequences, **{CACHE_FIELD: first[CACHE_FIELD]}, **options)
    assert torch.equal(again.sequences, by_hand(model, prompt, 18))


@torch.no_grad()
def test_a_prompt_of_embeddings_counts() -> None:
    """transformers leaves such a prompt out of the length that it prepares."""
    model, prompt = Variant("rope", rescale="dynamic:2").model(), draw_ids(1, TRAIN_LENGTH + 5)
    mask, options = torch.ones_like(prompt), {"max_new_tokens": 7, "do_sample": False}
    plain = model.generate(prompt, attention_mask=mask, **options)
    embedded = model.generate(inputs_embeds=model.embedding(prompt), attention_mask=mask, **options)
    assert torch.equal(embedded, plain[:, prompt.shape[1] :])


@torch.no_grad()
def test_a_preallocated_cache_generates_alike() -> None:
    """transformers would hand its mask over expanded to four dimensions."""
    model, prompt = Variant("rope").model(length=4 * TRAIN_LENGTH), draw_ids(1, TRAIN_LENGTH)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    static = model.generate(prompt, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(static, model.generate(prompt, **options))


@torch.no_grad()
def test_a_cache_begun_elsewhere_is_not_continued() -> None:
    """Positions that order and padding do not give are nothing that a later call could know."""
    model, ids = Variant("sinusoidal").model(length=64), draw_ids(1, 12)
    begun = model(ids[:, :8], position_ids=torch.arange(50, 58)[None], use_cache=True)
    with pytest.raises(ValueError, match="position_ids of its own"):
        model(ids[:, 8:], **{CACHE_FIELD: begun[CACHE_FIELD]})
