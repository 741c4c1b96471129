"""A study that trains in about a second: a folder of made-up text and a decoder of two narrow layers."""

import random
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import FullyShardedDataParallelPlugin
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pe_study.data import TrainBatches
from pe_study.recipe import Recipe, load
from pe_study.training.engine import make_accelerator
from pe_study.training.initial import build_model, load_data
from pe_study.training.updates import Updater

ENCODINGS = ("nope", "sinusoidal", "learned", "shaw", "t5", "rope", "alibi")
WORDS = ("distance", "query", "key", "bucket", "slope", "angle", "table", "window", "bias", "phase")


def write_corpus(folder: Path, num_documents: int = 80) -> Path:
    """Documents of 20 to 300 bytes, the same at every call."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for number in range(num_documents):
        text = " ".join(draw.choice(WORDS) for _ in range(draw.randrange(4, 40)))
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return folder


def write_llama(folder: Path, tokenizer: Path, **others: Any) -> Path:
    """A Llama of random weights: of the sizes of `tiny_recipe`, but for two key and value heads."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 257,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 16,
        "tie_word_embeddings": True,
    }
    LlamaForCausalLM(LlamaConfig(**{**sizes, **others})).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def llama_overrides(folder: Path) -> tuple[str, ...]:
    """What makes `tiny_recipe` train `folder/llama` on, written with 64 positions."""
    own = ("data.tokenizer=checkpoint", "model.num_kv_heads=2")
    return (f"init={{from: {folder / 'llama'}, rescale: none}}", "name=llama", *own)


def tiny_recipe(folder: Path, *overrides: str, encodings: tuple[str, ...] = ("rope",)) -> Recipe:
    """A recipe of 8 updates over 128 tokens in 8 sequences, over the corpus of `write_corpus`."""
    recipe = {
        "name": "tiny",
        "encodings": list(encodings),
        "model": {"num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 48, "max_positions": 64},
        "data": {"corpus": str(write_corpus(folder / "corpus")), "validation_fraction": 0.2},
        "train": {
            "length": 16,
            "batch_tokens": 128,
            "steps": 8,
            "lr": 3e-3,
            "warmup_steps": 2,
            "log_every": 1,
            "eval_every": 4,
            "snapshot_every": 3,
        },
        "eval": {"lengths": ["1x"]},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return load(path, overrides)


def make_updater(recipe: Recipe) -> Updater:
    """The model of the recipe's first run, ready for its first update."""
    accelerator = make_accelerator(recipe)
    data = load_data(recipe, accelerator)
    run, train = recipe.runs()[0], recipe.train
    batches = TrainBatches(
        data.train,
        length=train.length,
        batch_tokens=train.batch_tokens,
        seed=run.seed,
        packing=recipe.data.packing,
    )
    return Updater(recipe, run, accelerator, build_model(recipe, run, data.tokenizer), batches)


def shipped_fsdp() -> FullyShardedDataParallelPlugin:
    """What `accelerate launch` tells its processes of `recipes/accelerate/fsdp2.yaml`."""
    file = Path(__file__).parent.parent / "recipes" / "accelerate" / "fsdp2.yaml"
    said = yaml.safe_load(file.read_text(encoding="utf-8"))["fsdp_config"]
    names = said.get("fsdp_transformer_layer_cls_to_wrap")
    return FullyShardedDataParallelPlugin(
        fsdp_version=said["fsdp_version"],
        auto_wrap_policy=said["fsdp_auto_wrap_policy"].lower(),
        transformer_cls_names_to_wrap=names and names.split(","),
        reshard_after_forward=said["fsdp_reshard_after_forward"],
        cpu_ram_efficient_loading=said["fsdp_cpu_ram_efficient_loading"],
        state_dict_type=said["fsdp_state_dict_type"],
    )
