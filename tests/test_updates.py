"""One update: what is averaged, what is seeded, what stops it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import ENCODINGS, make_updater, tiny_recipe
from torch import Tensor

from pe_study.errors import NonFiniteLossError, UsageError
from pe_study.training.micro_batching import PADDING, micro_batches
from pe_study.training.schedules import learning_rate
from pe_study.training.updates import Updater, dropout_seed, seed_dropout


def gradients(updater: Updater) -> dict[str, Tensor]:
    updater.backward(0)
    return {name: weight.grad.clone() for name, weight in updater.model.named_parameters()}


def weights(updater: Updater) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in updater.model.named_parameters()}


def test_loss_is_the_plain_cross_entropy_of_the_next_token(tmp_path: Path) -> None:
    """case 10: shifted once, neither twice nor not at all."""
    updater = make_updater(tiny_recipe(tmp_path))
    ids_BT = updater.batches.batch(0).ids_BT
    logits_BTV = updater.model(ids_BT).logits
    expected = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
    assert updater.update(0).loss == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_accumulation_changes_nothing(tmp_path: Path, encoding: str) -> None:
    """case 14: micro-batches of one sequence each, with uneven numbers of targets."""
    overrides = ("data.packing=isolate", "train.gradient_checkpointing=true")
    whole = make_updater(tiny_recipe(tmp_path, *overrides[:1], encodings=(encoding,)))
    parts = make_updater(
        tiny_recipe(tmp_path, *overrides, "train.micro_batch_tokens=16", encodings=(encoding,))
    )
    counts = (whole.batches.batch(0).targets_BT != -100).sum(-1)
    assert len(set(counts.tolist())) > 1, "the case needs uneven counts"
    expected, found = gradients(whole), gradients(parts)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_loss_is_the_mean_over_targets_not_over_micro_batches(tmp_path: Path) -> None:
    """case 14: 10 targets at 2 nats and 90 at 4 are 3.8, not 3."""
    updater = make_updater(tiny_recipe(tmp_path))
    nats = iter([10 * 2.0, 90 * 4.0])
    updater._count_targets = lambda parts: 100  # type: ignore[method-assign]
    updater.micro_batches = lambda: [[0], [1]]  # type: ignore[method-assign]
    plain = updater.model.forward

    def forward(num_items_in_batch: int, **inputs: Any) -> Any:
        out = plain(num_items_in_batch=num_items_in_batch, **inputs)
        out.loss = out.loss * 0 + next(nats) / num_items_in_batch
        return out

    updater.model.forward = forward
    loss, _ = updater.backward(0)
    assert loss.item() == pytest.approx(3.8)


def test_every_real_token_is_a_target(tmp_path: Path) -> None:
    """case 38: the separator and token 0 count like any other; nothing is masked by its id."""
    updater = make_updater(tiny_recipe(tmp_path))
    batch = updater.batches.batch(0)
    assert updater._count_targets([batch]) == batch.ids_BT[:, 1:].numel()


def test_learning_rates_reach_every_group(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, encodings=("t5",))
    updater = make_updater(recipe)
    for step in range(recipe.train.steps):
        expected = learning_rate(recipe.train, step)
        assert updater.update(step).lr == expected
        for group in updater.optimizer.param_groups:
            assert group["lr"] == expected * group["lr_mult"]
    mults = {group["name"]: group["lr_mult"] for group in updater.optimizer.param_groups}
    assert mults["decay"] == mults["no_decay"] == 1.0
    assert mults["position"] > 1.0


def test_every_weight_is_in_one_group_and_trained(tmp_path: Path) -> None:
    """case 46: the tied head once."""
    updater = make_updater(tiny_recipe(tmp_path, encodings=("t5",)))
    grouped = [id(weight) for group in updater.optimizer.param_groups for weight in group["params"]]
    assert sorted(grouped) == sorted(id(weight) for weight in updater.model.parameters())
    before = weights(updater)
    updater.update(0)
    assert all(not torch.equal(before[name], after) for name, after in weights(updater).items())


def test_gradient_norm_is_reported_before_clipping(tmp_path: Path) -> None:
    updater = make_updater(tiny_recipe(tmp_path, "train.grad_clip=0.01"))
    expected = math.sqrt(sum(grad.square().sum().item() for grad in gradients(updater).values()))
    updater.optimizer.zero_grad()
    clipped: list[float] = []
    step = updater.optimizer.optimizer.step

    def watch(closure: None) -> None:
        clipped.append(torch.nn.utils.get_total_norm(updater._gradients()).item())
        step()

    updater.optimizer.optimizer.step = watch
    assert updater.update(0).grad_norm == pytest.approx(expected, rel=1e-5)
    assert clipped == pytest.approx([0.01], rel=1e-3)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_non_finite_step_changes_no_weight(tmp_path: Path, where: str) -> None:
    updater = make_updater(tiny_recipe(tmp_path))
    updater.update(0)
    before = weights(updater)
    name, weight = list(updater.model.named_parameters())[1]
    if where == "loss":
        bad = updater.batches.batch(1, [5]).ids_BT[:, :-1]
        plain = updater.model.forward

        def forward(input_ids: Tensor, **inputs: Any) -> Any:
            out = plain(input_ids=input_ids, **inputs)
            if (input_ids[:, None] == bad).all(-1).any():
                out.loss = out.loss * math.nan
            return out

        updater.model.forward = forward
    else:
        weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(NonFiniteLossError, match=r"step 2: .*\n.*parameters with a bad gradient") as caught:
        updater.update(1)
    report = caught.value.report
    assert all(torch.equal(before[name], after) for name, after in weights(updater).items())
    assert report["step"] == 2
    if where == "loss":
        assert report["documents"] == sorted(updater.batches.documents(1, [5]))
    else:
        assert report["parameters"] == [name]
        assert report["documents"] == sorted(updater.batches.documents(1))


def test_out_of_memory_halves_the_micro_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The batch, and so the weights, stay what they would have been."""
    expected = make_updater(tiny_recipe(tmp_path)).update(0)
    updater = make_updater(tiny_recipe(tmp_path))
    plain = updater.model.forward

    def forward(input_ids: Tensor, **inputs: Any) -> Any:
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return plain(input_ids=input_ids, **inputs)

    updater.model.forward = forward
    update = updater.update(0)
    assert updater.micro_sequences == 2
    assert "micro-batches now have 32 tokens" in caplog.text
    assert (update.loss, update.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-5)


def test_a_sequence_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    updater = make_updater(tiny_recipe(tmp_path))

    def forward(**inputs: Any) -> Any:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 4 TB")

    updater.model.forward = forward
    with pytest.raises(UsageError, match="out of memory with one sequence of 16 tokens"):
        updater.update(0)


@pytest.mark.parametrize("where", ["step", "creation"])
def test_an_optimizer_that_does_not_fit_is_an_error(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its two moments are made at the first update, where smaller micro-batches are no help."""

    def fail(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    recipe = tiny_recipe(tmp_path)
    if where == "creation":
        monkeypatch.setattr("accelerate.Accelerator.prepare", fail)
        with pytest.raises(UsageError, match="the weights and their optimizer did not fit memory"):
            make_updater(recipe)
        return
    updater = make_updater(recipe)
    monkeypatch.setattr(torch.optim.AdamW, "step", fail)
    with pytest.raises(
        UsageError, match=r"step 1: the optimizer, .* did not fit memory.*fsdp2\.yaml"
    ) as caught:
        updater.update(0)
    assert "\n" not in str(caught.value)


def test_other_failures_are_not_taken_for_memory(tmp_path: Path) -> None:
    updater = make_updater(tiny_recipe(tmp_path))

    def forward(**inputs: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    updater.model.forward = forward
    with pytest.raises(RuntimeError, match="shapes"):
        updater.update(0)


def test_dropout_differs_by_seed_process_and_step() -> None:
    """case 48"""
    seeds = {dropout_seed(seed, rank, step) for seed in range(5) for rank in range(8) for step in range(50)}
    assert len(seeds) == 5 * 8 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_dropout_is_seeded_as_torch_does_it() -> None:
    torch.manual_seed(2**40 + 3)
    expected = torch.rand(5)
    seed_dropout(2**40 + 3, torch.device("cpu"))
    assert torch.equal(torch.rand(5), expected)


def test_dropout_is_a_function_of_the_step(tmp_path: Path) -> None:
    updater = make_updater(tiny_recipe(tmp_path, "model.dropout=0.5"))
    updater.model.train()
    first, _ = updater.backward(3)
    torch.rand(7)
    again, _ = updater.backward(3)
    assert first == again


@pytest.mark.parametrize(("num_slots", "num_processes", "size"), [(8, 1, 3), (8, 2, 3), (7, 2, 2), (1, 4, 1)])
def test_processes_share_the_slots_out(num_slots: int, num_processes: int, size: int) -> None:
    """case 48: disjoint, complete, and in shapes that are alike on every process."""
    shares = [
        micro_batches(num_slots, rank=rank, num_processes=num_processes, size=size)
        for rank in range(num_processes)
    ]
    slots = [slot for parts in shares for part in parts for slot in part if slot != PADDING]
    assert sorted(slots) == list(range(num_slots))
    assert len({tuple(len(part) for part in parts) for parts in shares}) == 1


def test_padding_counts_nothing(tmp_path: Path) -> None:
    updater = make_updater(tiny_recipe(tmp_path))
    batch = updater.load(0, [3, PADDING])
    assert (batch.targets_BT != -100).sum(-1).tolist() == [16, 0]
