"""`packing: isolate`: a packed document reads as if it stood alone, whatever lies before it. Case 53."""

from pathlib import Path

import pytest
import torch
from tiny import make_updater, tiny_recipe
from torch import Tensor
from variants import Variant, all_variants, draw_ids

from pe_study import attention
from pe_study.errors import UsageError
from pe_study.model import PEStudyForCausalLM

KERNELS = ("eager", "sdpa", "flex")
CLOSE = 2e-4  # logits of a few units in float32, other keys summed around the same ones


def packed(*lengths: int) -> Tensor:
    """(1, T) which document each token belongs to."""
    return torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]


def model_of(variant: Variant, kernel: str) -> PEStudyForCausalLM:
    """Skips what a kernel refuses: then it does not run here."""
    model = variant.model(kernel=kernel, length=48)
    try:
        attention.resolve(kernel, torch.device("cpu"), torch.float32, model.first_encoding, "segments")
    except UsageError as refusal:
        pytest.skip(str(refusal))
    if model.max_length is not None and model.max_length < 48:
        pytest.skip(f"positions for {model.max_length} tokens alone")
    return model


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("variant", all_variants(), ids=str)
@torch.no_grad()
def test_a_document_does_not_know_what_lies_before_it(variant: Variant, kernel: str) -> None:
    model = model_of(variant, kernel)
    first, other, second = draw_ids(1, 9), draw_ids(1, 9, seed=4), draw_ids(1, 14, seed=2)
    number = packed(9, 14)
    logits = model(torch.cat([first, second], 1), segment_ids=number).logits
    changed = model(torch.cat([other, second], 1), segment_ids=number).logits
    assert torch.equal(logits[:, 9:], changed[:, 9:]), "not by a bit"
    assert not torch.equal(logits[:, :9], changed[:, :9])
    alone = model(second).logits
    assert (logits[:, 9:] - alone).abs().max() < CLOSE
    longer = model(torch.cat([first, first[:, :4], second], 1), segment_ids=packed(13, 14)).logits
    assert (longer[:, 13:] - alone).abs().max() < CLOSE, "nor how much lies before it"


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", all_variants(), ids=str)
def test_no_gradient_crosses_a_border(variant: Variant, kernel: str) -> None:
    model = model_of(variant, kernel)
    embedded = model.embedding(torch.cat([draw_ids(1, 9), draw_ids(1, 14, seed=2)], 1)).detach()
    embedded.requires_grad_()
    model(inputs_embeds=embedded, segment_ids=packed(9, 14)).logits[:, 9:].square().sum().backward()
    assert embedded.grad is not None
    assert bool((embedded.grad[:, :9] == 0).all())
    assert bool((embedded.grad[:, 9:] != 0).any())


def test_training_sees_no_border(tmp_path: Path) -> None:
    """The trainer hands the borders of its batches to the model: the loss is that of the documents alone."""
    updater = make_updater(tiny_recipe(tmp_path, "data.packing=isolate", encodings=("sinusoidal",)))
    updater.model.eval()
    batch = updater.batches.batch(0)
    assert batch.segments_BT is not None
    total = 0.0
    for ids, targets, segments in zip(batch.ids_BT, batch.targets_BT, batch.segments_BT, strict=True):
        for number in segments.unique():
            own = segments == number
            out = updater.model(
                ids[:-1][own][None], shift_labels=targets[own][None], num_items_in_batch=1, use_cache=False
            )
            total += out.loss.item()
    num_targets = int((batch.targets_BT != -100).sum())
    assert updater.loss(batch, num_targets).item() == pytest.approx(total / num_targets, rel=1e-5)
