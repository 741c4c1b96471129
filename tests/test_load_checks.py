"""What is refused when a checkpoint is opened or loaded: what is not causal, a kernel that cannot run."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BloomConfig,
    ElectraConfig,
    LlamaConfig,
    MixtralConfig,
    RobertaConfig,
    T5Config,
    XLNetConfig,
)

from pe_study import cli
from pe_study.checkpoints import load_causal_lm, open_checkpoint
from pe_study.errors import CheckpointError, UsageError
from pe_study.loading.load_checks import check_causal
from pe_study.text.tokenization import byte_tokenizer

SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
ENCODERS = {"bert": BertConfig, "roberta": RobertaConfig, "electra": ElectraConfig}
T5 = T5Config(vocab_size=257, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)


def saved(config, folder, auto=AutoModelForCausalLM) -> str:
    torch.manual_seed(0)
    auto.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_refused_however_little_it_looks_ahead(name, dtype, tmp_path):
    """At its default initialisation, by which logits ahead change in the third digit."""
    source = saved(ENCODERS[name](**SIZES), tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        load_causal_lm(source, dtype=dtype)
    said = str(refusal.value)
    assert said.startswith(f"{source}: not a causal language model (found ")
    assert said.endswith("an encoder: is_decoder is not set in its config.json)")
    assert refusal.value.exit_code == 4


@pytest.mark.parametrize("name", ENCODERS)
def test_the_same_with_a_decoder_s_mask_is_loaded(name, tmp_path):
    load_causal_lm(saved(ENCODERS[name](**SIZES, is_decoder=True), tmp_path))


def test_what_looks_ahead_without_saying_so_is_found(tmp_path):
    config = XLNetConfig(vocab_size=257, d_model=32, n_layer=2, n_head=2, d_inner=32)
    with pytest.raises(CheckpointError, match="xlnet looks at the tokens to come"):
        load_causal_lm(saved(config, tmp_path))


class Leaking:
    """A Llama whose logits before the last token move by `share` of what the last ones move by."""

    def __init__(self, share: float, dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).to(dtype)
        self.share, self.config, self.device, self.dtype = share, self.model.config, self.model.device, dtype

    def modules(self):
        return self.model.modules()

    def __call__(self, ids, **options):
        output = self.model(ids, **options)
        output.logits[:, :-1] += self.share * output.logits[:, -1:]
        return output


@pytest.mark.parametrize(
    ("dtype", "share", "refused"),
    [
        (torch.float32, 0.0, False),
        (torch.float32, 1e-6, False),
        (torch.float32, 1e-3, True),
        (torch.float32, float("nan"), False),  # is told as a row of its own
        (torch.bfloat16, 1e-2, False),
        (torch.bfloat16, 0.2, True),
    ],
)
def test_the_threshold_is_that_of_rounding(dtype, share, refused):
    model = Leaking(share, dtype)
    if not refused:
        check_causal("it", model)
        return
    with pytest.raises(CheckpointError, match=r"it: not a causal language model \(llama looks"):
        check_causal("it", model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_causal(dtype, tmp_path):
    load_causal_lm(
        saved(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4), tmp_path), dtype=dtype
    )


def test_an_architecture_without_a_causal_model_is_named_before_all_else(tmp_path, capsys):
    source = saved(T5, tmp_path / "t5", AutoModelForSeq2SeqLM)
    said = "not a causal language model (found T5ForConditionalGeneration, an encoder with a decoder)"
    with pytest.raises(CheckpointError) as refusal:
        assert open_checkpoint(source).config
    assert str(refusal.value) == f"{source}: {said}"
    assert cli.main(["eval", source, "--output", str(tmp_path / "out")]) == 4
    assert capsys.readouterr().err == f"pe-study: {source}: {said}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="flash may be there")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_that_is_not_there_names_those_that_are(dtype, tmp_path, capsys):
    """Design, section 4, on a checkpoint of others: a flag's mistake, exit code 2."""
    source = saved(LlamaConfig(**SIZES), tmp_path / "llama")
    said = f"kernel flash cannot run llama in {dtype} without flash-attn and a CUDA GPU; "
    said += "these can: eager, sdpa, flex"
    with pytest.raises(UsageError) as refusal:
        load_causal_lm(source, kernel="flash", dtype=dtype)
    assert str(refusal.value) == said
    argv = ["eval", source, "--kernel", "flash", "--dtype", dtype, "--lengths", "8", "--protocol", "prefix"]
    assert cli.main([*argv, "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"pe-study: {said}\n"


def test_a_kernel_that_an_architecture_does_not_support(tmp_path):
    config = BloomConfig(vocab_size=257, hidden_size=32, n_layer=1, n_head=2)
    source = saved(config, tmp_path)
    for kernel in ("sdpa", "flex"):
        with pytest.raises(
            UsageError, match=f"kernel {kernel} cannot run bloom in float32; these can: eager$"
        ):
            load_causal_lm(source, kernel=kernel)
    load_causal_lm(source, kernel="eager")
