"""The configuration of the decoder, as transformers stores it."""

from __future__ import annotations

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

from pe_study import encodings
from pe_study.encodings.base import Encoding


@strict
class PEStudyConfig(PreTrainedConfig):
    """Sizes as in a recipe's `model` section, the encoding and its options, and how the model was loaded.

    `train_length` is the length training saw; `length` the declared length (None: none declared); `rescale`
    and `kernel` as in a plan; `seed` draws the initial weights.
    """

    model_type = "pe_study"
    keys_to_ignore_at_inference: ClassVar = ["cache", "past_key_values"]
    attribute_map: ClassVar = {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "d_ff",
    }

    vocab_size: int = 257
    num_layers: int = 4
    d_model: int = 128
    num_heads: int = 4
    num_kv_heads: int = 4
    d_ff: int = 384
    max_positions: int = 1024
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    qk_norm: bool = False
    dropout: float = 0.0
    encoding: dict | None = None
    train_length: int = 64
    length: int | None = None
    rescale: str = "none"
    kernel: str = "auto"
    seed: int = 0
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def validate_heads(self) -> None:
        """As transformers checks a configuration: refused before anything is built."""
        if min(self.num_heads, self.num_kv_heads) < 1 or self.d_model % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} must divide d_model {self.d_model}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}")
        if self.encoding is not None and "name" not in self.encoding:
            accepted = ", ".join(encodings.available())
            raise ValueError(f"encoding {self.encoding} has no name; accepted: {accepted}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def encoding_name(self) -> str:
        return (self.encoding or {"name": encodings.CONTROL})["name"]

    def build_encoding(self) -> Encoding:
        options = dict(self.encoding or {"name": encodings.CONTROL})
        return encodings.build(
            options.pop("name"),
            d_model=self.d_model,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            max_positions=self.max_positions,
            train_length=self.train_length,
            initializer_range=self.initializer_range,
            length=self.length,
            rescale=self.rescale,
            **options,
        )


AutoConfig.register("pe_study", PEStudyConfig, exist_ok=True)
