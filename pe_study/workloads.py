"""What a benchmark runs: our decoder and its peers at one set of sizes, and one step of each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import cast

import torch
from torch import Tensor, nn

from pe_study.configuration import PEStudyConfig

PEERS = ("LlamaForCausalLM", "x-transformers")


@dataclass(frozen=True)
class Sizes:
    """The decoder that every workload builds."""

    num_layers: int = 4
    d_model: int = 128
    num_heads: int = 4
    num_kv_heads: int = 4
    d_ff: int = 384
    vocab_size: int = 256


@dataclass(frozen=True)
class Workload:
    """One thing to measure: a name (an encoding's or a peer's), a phase, a kernel and a length in tokens."""

    name: str
    phase: str
    length: int
    kernel: str
    batch_tokens: int
    sizes: Sizes
    device: str
    dtype: str
    compiled: bool = False

    @property
    def title(self) -> str:
        """ "rope" or "rope, compiled"."""
        return f"{self.name}, compiled" if self.compiled else self.name

    @property
    def is_peer(self) -> bool:
        return self.name in PEERS

    @property
    def num_sequences(self) -> int:
        return max(1, self.batch_tokens // self.length)

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.length


def is_installed(peer: str) -> bool:
    """Whether a peer's package is there: that of LlamaForCausalLM always is."""
    return (
        importlib.util.find_spec({"x-transformers": "x_transformers"}.get(peer, "transformers")) is not None
    )


def build(workload: Workload) -> nn.Module:
    """The model of a workload, on its device, ready for its phase."""
    torch.manual_seed(0)
    builders = {"LlamaForCausalLM": _llama, "x-transformers": _x_transformers}
    model = builders.get(workload.name, _ours)(workload)
    dtype = getattr(torch, workload.dtype)
    return model.to(workload.device, dtype).train(workload.phase == "train")


def _ours(workload: Workload) -> nn.Module:
    from pe_study.model import PEStudyForCausalLM

    return PEStudyForCausalLM(_config(workload, workload.name))


def _llama(workload: Workload) -> nn.Module:
    from transformers import LlamaForCausalLM

    from pe_study.export import llama_config

    config = llama_config(_config(workload, "rope"), base=10000.0)
    config.use_cache = False
    return LlamaForCausalLM(config)


def _config(workload: Workload, encoding: str) -> PEStudyConfig:
    # Untrained positions are not the point here: the learned table is as long as the input.
    return PEStudyConfig(
        **asdict(workload.sizes),
        encoding={"name": encoding},
        train_length=min(workload.length, 512),
        max_positions=max(workload.length, 512),
        kernel=workload.kernel,
        use_cache=False,
    )


def _x_transformers(workload: Workload) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    sizes = workload.sizes
    decoder = Decoder(
        dim=sizes.d_model,
        depth=sizes.num_layers,
        heads=sizes.num_heads,
        attn_dim_head=sizes.d_model // sizes.num_heads,
        attn_kv_heads=sizes.num_kv_heads,
        attn_flash=True,
        rotary_pos_emb=True,
        rotary_emb_dim=sizes.d_model // sizes.num_heads,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        ff_mult=sizes.d_ff / sizes.d_model,
    )
    return TransformerWrapper(
        num_tokens=sizes.vocab_size,
        max_seq_len=workload.length,
        attn_layers=decoder,
        tie_embedding=True,
        use_abs_pos_emb=False,
    )


def step_of(workload: Workload, model: nn.Module) -> Callable[[], None]:
    """One update (forward, loss, backward, AdamW) or one forward pass with its loss.

    A compiled workload goes through torch.compile as the trainer's `train.compile` does.
    """
    model = cast(nn.Module, torch.compile(model)) if workload.compiled else model
    generator = torch.Generator().manual_seed(0)
    shape = (workload.num_sequences, workload.length + 1)
    ids = torch.randint(workload.sizes.vocab_size, shape, generator=generator).to(workload.device)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if workload.phase == "eval":
        return torch.inference_mode()(lambda: _wait(_loss(workload, model, inputs, targets)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def update() -> None:
        loss = _loss(workload, model, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _wait(loss)

    return update


def _loss(workload: Workload, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    if workload.name == "x-transformers":
        logits = model(inputs)
    elif workload.name == "LlamaForCausalLM":
        return model(inputs, labels=inputs, shift_labels=targets, num_items_in_batch=targets.numel()).loss
    else:
        return model(inputs, shift_labels=targets, num_items_in_batch=targets.numel()).loss
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _wait(loss: Tensor) -> None:
    """Until the device has done it all."""
    loss.detach().item()
