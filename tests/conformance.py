"""What every position encoding must do, as functions of a variant; test_conformance.py runs them on all.

Bounds on float32 logits are absolute, for logits of standard deviation about 1.6.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from variants import TRAIN_LENGTH, VOCABULARY, Variant, draw_ids, in_pieces

from pe_study import attention
from pe_study.errors import LengthError, UsageError

CHUNKED = 300
"""A length that is read in chunks, and no multiple of one."""
CLOSE = 1e-4
"""Two orders of summation in float32, two layers deep; a wrong position moves logits by more than 1e-2."""


def kernels(variant: Variant, length: int) -> list[str]:
    """The kernels that run the variant here, forward; FlexAttention, slow on a CPU, for defaults alone."""
    encoding, possible = variant.model(length=length).first_encoding, []
    for kernel in attention.KERNELS if variant == Variant(variant.name) else ("eager", "sdpa"):
        try:
            attention.resolve(kernel, torch.device("cpu"), torch.float32, encoding, "causal")
        except UsageError:
            continue
        possible.append(kernel)
    return possible


def lengths(variant: Variant) -> list[int]:
    """1x, 2x and 4x the training length, as far as the encoding has positions."""
    wanted = (TRAIN_LENGTH, 2 * TRAIN_LENGTH, 4 * TRAIN_LENGTH)
    limits = [variant.model(length=length).max_length for length in wanted]
    return [n for n, limit in zip(wanted, limits, strict=True) if limit is None or n <= limit]


def assert_close(found: Tensor, expected: Tensor, bound: float = CLOSE) -> None:
    assert found.shape == expected.shape
    assert bool(found.isfinite().all())
    assert (found - expected).abs().max().item() < bound


@torch.no_grad()
def check_causal(variant: Variant, tmp_path: Path) -> None:
    """A changed token changes no earlier logit, not by a bit, and does change its own."""
    length = lengths(variant)[-1]
    for kernel in kernels(variant, length):
        model = variant.model(length=length, kernel=kernel)
        ids = draw_ids(1, length)
        changed = ids.clone()
        changed[:, length // 2] = (changed[:, length // 2] + 1) % VOCABULARY
        before, after = model(ids).logits, model(changed).logits
        assert torch.equal(before[:, : length // 2], after[:, : length // 2]), kernel
        assert (before - after)[:, length // 2].abs().max() > 1e-2


@torch.no_grad()
def check_cached_equals_full(variant: Variant, tmp_path: Path) -> None:
    """Token by token and in chunks, at every declared length, what is read through the cache is the same.

    case 15: a mask aligned top-left hides the cache. case 19: keys and queries turned with two bases.
    case 30: a bias that ignores the cache's offset.
    """
    for length in lengths(variant):
        for kernel in kernels(variant, length):
            model = variant.model(length=length, kernel=kernel)
            ids = draw_ids(2, length)
            full = model(ids, use_cache=False).logits
            assert_close(in_pieces(model, ids, (5, 1, 7, length)), full)
            if kernel == "sdpa" and length <= 2 * TRAIN_LENGTH:
                assert_close(in_pieces(model, ids, (1,)), full)


@torch.no_grad()
def check_padding(variant: Variant, tmp_path: Path) -> None:
    """case 51: padding, left or right, with any token, leaves the logits of the real ones alone."""
    length = lengths(variant)[-1]
    short = length // 2 - 3
    for kernel in kernels(variant, length):
        model = variant.model(length=length, kernel=kernel)
        ids = draw_ids(1, length)
        alone = model(ids[:, :short]).logits
        whole = model(ids).logits
        for left in (True, False):
            padded, mask = draw_ids(2, length, seed=5), torch.ones(2, length, dtype=torch.long)
            real = slice(length - short, length) if left else slice(0, short)
            mask[0] = 0
            mask[0, real] = 1
            padded[0, real], padded[1] = ids[0, :short], ids[0]
            logits = model(padded, attention_mask=mask).logits
            assert_close(logits[:1, real], alone)
            assert_close(logits[1:], whole)


@torch.no_grad()
def check_padded_cache(variant: Variant, tmp_path: Path) -> None:
    """Prompts of unequal length, padded left or right, continued through the cache, read as if alone."""
    length = lengths(variant)[-1]
    short, more = length // 2 - 3, length // 4
    for kernel in kernels(variant, length):
        model = variant.model(length=length, kernel=kernel)
        ids = draw_ids(1, short + more)
        alone = model(ids).logits[:, short:]
        for left in (True, False):
            pad = length - more - short
            prompt = torch.zeros(1, length - more, dtype=torch.long)
            real = slice(pad, None) if left else slice(0, short)
            mask = torch.zeros(1, length, dtype=torch.long)
            prompt[:, real] = ids[:, :short]
            mask[:, : length - more][:, real] = 1
            mask[:, length - more :] = 1
            first = model(prompt, attention_mask=mask[:, : length - more], use_cache=True)
            cache = first[next(key for key in first if key != "logits")]
            rest = model(ids[:, short:], attention_mask=mask, past_key_values=cache).logits
            assert_close(rest, alone)


@torch.no_grad()
def check_shift(variant: Variant, tmp_path: Path) -> None:
    """case 49: what calls itself relative gives the same logits with every position moved by 1000."""
    model = variant.model(max_positions=2048)
    if model.first_encoding.depends_on_length:
        model.declare(2048)
    if model.max_length is not None and model.max_length < 1000 + TRAIN_LENGTH:
        return
    ids = draw_ids(1, TRAIN_LENGTH)
    place = torch.arange(TRAIN_LENGTH)[None]
    apart = (model(ids).logits - model(ids, position_ids=place + 1000).logits).abs().max().item()
    if type(model.first_encoding).is_relative:
        assert apart < 1e-3
    elif getattr(model.first_encoding, "beyond", None) != "clamp":
        assert apart > 1e-2


def check_gradients(variant: Variant, tmp_path: Path) -> None:
    """Training at the training length reaches every parameter that the encoding adds, with finite numbers."""
    for kernel in ("eager", "sdpa"):
        model = variant.model(kernel=kernel).train()
        ids = draw_ids(3, TRAIN_LENGTH)
        model(ids, labels=ids).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert bool(parameter.grad.isfinite().all()), name
            assert bool((parameter.grad != 0).any()), name


@torch.no_grad()
def check_save_and_load(variant: Variant, tmp_path: Path) -> None:
    """case 25: saved at one length, loaded strictly at another; no computed table is among the weights.

    case 44: the table that is built under from_pretrained's meta device is the right one.
    """
    model = variant.model(length=TRAIN_LENGTH)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert set(model.state_dict()) == parameters
    assert not list(model.buffers())
    model.save_pretrained(tmp_path)
    ids = draw_ids(2, TRAIN_LENGTH)
    for length in lengths(variant):
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, length=length, output_loading_info=True)
        assert not any(info.values()), info
        fresh = variant.model(length=length)
        fresh.load_state_dict(model.state_dict(), strict=True)
        assert torch.equal(loaded(ids).logits, fresh(ids).logits)
        if not model.first_encoding.depends_on_length:
            assert torch.equal(loaded(ids).logits, model(ids).logits)


@torch.no_grad()
def check_max_length(variant: Variant, tmp_path: Path) -> None:
    """case 33: too long is refused in one line before any kernel: input, position, generation."""
    length = lengths(variant)[-1]
    model = variant.model(length=length)
    limit = length if model.max_length is None else min(length, model.max_length)
    model(draw_ids(1, limit))
    ran: list[int] = []
    model.embedding.register_forward_hook(lambda *_: ran.append(1))
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: pytest.fail("a kernel ran"))
    with pytest.raises(LengthError, match=r"^[^\n]+$"):
        model(draw_ids(1, limit + 1))
    if model.max_length is not None:
        with pytest.raises(LengthError, match=f"positions for {model.max_length}"):
            model(draw_ids(1, 2), position_ids=torch.tensor([[0, model.max_length]]))
    with pytest.raises(LengthError):
        model.generate(draw_ids(1, limit), max_new_tokens=2, do_sample=False)


@torch.no_grad()
def check_kernels_agree(variant: Variant, tmp_path: Path) -> None:
    """Every kernel's logits are those of `eager`, at every length."""
    for length in lengths(variant):
        ids = draw_ids(2, length)
        oracle = variant.model(length=length, kernel="eager")(ids).logits
        for kernel in kernels(variant, length):
            assert_close(variant.model(length=length, kernel=kernel)(ids).logits, oracle)


@torch.no_grad()
def check_segments(variant: Variant, tmp_path: Path) -> None:
    """case 53: a changed document changes another's logits by exactly 0, in every kernel."""
    length = lengths(variant)[-1]
    ids = draw_ids(1, length)
    segments = (torch.arange(length)[None] >= length // 3).long()
    changed = ids.clone()
    changed[:, : length // 3] = (ids[:, : length // 3] + 1) % VOCABULARY
    for kernel in kernels(variant, length):
        model = variant.model(length=length, kernel=kernel)
        before = model(ids, segment_ids=segments).logits[:, length // 3 :]
        after = model(changed, segment_ids=segments).logits[:, length // 3 :]
        assert torch.equal(before, after), kernel
        assert (model(changed).logits[:, length // 3 :] - before).abs().max() > 1e-2


@torch.no_grad()
def check_generate(variant: Variant, tmp_path: Path) -> None:
    """Greedy continuation with and without the cache, past the training length, alone and in a batch."""
    longest = lengths(variant)[-1]
    model = variant.model(length=longest)
    new = longest // 4
    prompts = [draw_ids(1, n, seed=n) for n in (3, longest - new)]
    width = max(prompt.shape[1] for prompt in prompts)
    batch, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        batch[row, width - prompt.shape[1] :], mask[row, width - prompt.shape[1] :] = prompt, 1
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    together = model.generate(batch, attention_mask=mask, **options)[:, width:]
    for row, prompt in enumerate(prompts):
        ones = torch.ones_like(prompt)
        cached = model.generate(prompt, attention_mask=ones, use_cache=True, **options)
        plain = model.generate(prompt, attention_mask=ones, use_cache=False, **options)
        assert torch.equal(cached, plain)
        assert torch.equal(together[row], cached[0, prompt.shape[1] :])


def check_kernel_gradients(variant: Variant, tmp_path: Path) -> None:
    """Every gradient of a training step is that of `eager`, also at a length that is read in chunks."""
    for length in (TRAIN_LENGTH, CHUNKED):
        models = [variant.model(kernel=kernel, length=length).train() for kernel in ("eager", "sdpa")]
        if models[0].max_length is None or models[0].max_length >= length:
            exact, found = (_gradients(model, length) for model in models)
            torch.testing.assert_close(found, exact, atol=2e-5, rtol=1e-3)


def check_compiled(variant: Variant, tmp_path: Path) -> None:
    """torch.compile: loss and gradients of the traced model are those of the plain one, at a length that is
    read in chunks where the encoding goes so far."""
    limit = variant.model(length=CHUNKED).max_length
    length = CHUNKED if limit is None or limit >= CHUNKED else TRAIN_LENGTH
    model = variant.model(length=length).train()
    plain = _gradients(model, length)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        traced = _gradients(torch.compile(model, backend="aot_eager"), length)
    torch._dynamo.reset()
    torch.testing.assert_close(traced, plain, atol=2e-5, rtol=1e-3)


def _gradients(model: torch.nn.Module, length: int) -> dict[str, Tensor]:
    """Of each parameter, and the loss under no name."""
    model.zero_grad()
    ids = draw_ids(2, length)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name.removeprefix("_orig_mod."): grad for name, grad in gradients.items()} | {"": loss.detach()}


def check_low_precision(variant: Variant, tmp_path: Path) -> None:
    """A model cast to bfloat16 is no farther from float32 in the chunked kernels than twice plain `eager`."""
    length = lengths(variant)[-1]
    ids = draw_ids(2, length)
    with torch.no_grad():
        exact = variant.model(length=length, kernel="eager")(ids).logits
        errors = {
            kernel: (variant.model(length=length, kernel=kernel).bfloat16()(ids).logits.float() - exact)
            for kernel in ("eager", "sdpa")
        }
    plain, ours = errors["eager"].square().mean().sqrt(), errors["sdpa"].square().mean().sqrt()
    assert ours < 2 * plain


CHECKS: tuple[Callable[[Variant, Path], None], ...] = (
    check_causal,
    check_cached_equals_full,
    check_padding,
    check_padded_cache,
    check_shift,
    check_gradients,
    check_save_and_load,
    check_max_length,
    check_kernels_agree,
    check_kernel_gradients,
    check_compiled,
    check_segments,
    check_generate,
    check_low_precision,
)

OF_AN_OPTION = (
    check_causal,
    check_cached_equals_full,
    check_padding,
    check_gradients,
    check_save_and_load,
    check_max_length,
    check_kernels_agree,
    check_segments,
)
"""What a choice other than the default is checked for; the rest follows from these and costs most."""

OF_A_RESCALE = (
    check_cached_equals_full,
    check_padded_cache,
    check_save_and_load,
    check_max_length,
    check_kernels_agree,
    check_generate,
)
"""What a rescale could break; the rest cannot see it."""
