"""Weights and optimizer state by parameter name: what a snapshot holds, whole, whatever the sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter on the CPU, tied ones once. On sharded models a meeting of all processes."""
    return {name: _gather(weight) for name, weight in model.named_parameters()}


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `weights` returned. Names and shapes are equal, or the recipe would have been refused."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_scatter(tensors[name], weight))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors as `<parameter>.<key>` on the CPU."""
    return {
        f"{name}.{key}": _gather(value)
        for name, weight in model.named_parameters()
        for key, value in optimizer.state[weight].items()
    }


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Put back what `optimizer_state` returned."""
    by_name = dict(model.named_parameters())
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition(".")
        weight = by_name[name]
        # Adam's count of steps is a scalar beside each weight, never sharded.
        put = value.to(weight.device) if value.ndim == 0 and weight.ndim else _scatter(value, weight)
        optimizer.state[weight][key] = put


def sha256(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names and bytes of all weights, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def whole(tensor: Tensor) -> Tensor:
    """The plain tensor of a sharded one: a meeting of all processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gather(tensor: Tensor) -> Tensor:
    return whole(tensor).detach().to("cpu", copy=True)


def _scatter(tensor: Tensor, like: Tensor) -> Tensor:
    tensor = tensor.to(like.device)
    return (
        distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor
    )
