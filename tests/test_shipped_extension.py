"""The shipped recipe of context extension goes on from the shipped demonstration's run."""

from pathlib import Path

import pytest
from tiny import write_corpus
from transformers import AutoModelForCausalLM

from pe_study import recipe, runs
from pe_study.train import train_study
from pe_study.training.engine import make_accelerator
from pe_study.training.initial import load_data
from pe_study.training.validation import Validator

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates of the demonstration's rope run, two more of its extension; returns the extension's run."""
    folder = tmp_path_factory.mktemp("extension")
    few = ["train.steps=2", "train.warmup_steps=1", f"data.corpus={write_corpus(folder / 'corpus')}"]
    few += ["data.validation_fraction=0.2", "eval.lengths=[64]"]
    demo = recipe.load(ROOT / "recipes/demo.yaml", [*few, "train.batch_tokens=256"])
    base = train_study(demo, folder / "runs", {"encoding": "rope"})[0].folder
    longer = [*few, "train.batch_tokens=512", f"init.from={base}"]
    return train_study(recipe.load(ROOT / "recipes/extend-demo.yaml", longer), folder / "runs")[0].folder


def test_the_shipped_extension_fits_the_shipped_demonstration(extended: Path) -> None:
    assert extended.parts[-2:] == ("extend-demo", "rope-s0")
    assert runs.is_done(extended)


def test_its_weights_declare_the_rescale_and_the_longer_length(extended: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(extended / "final").config
    assert (config.train_length, config.length, config.rescale) == (64, 256, "yarn:4")


@pytest.mark.slow
def test_it_beats_the_untuned_rescale(tmp_path: Path) -> None:
    """The recipes as they are shipped, text, model and lengths, but a quarter of the demonstration's updates,
    a third of the extension's and half the batch: at 256 tokens YaRN's frequencies, trained, leave less loss
    than the same frequencies alone, and than none."""
    demo = recipe.load(ROOT / "recipes/demo.yaml", ["train.steps=60", "train.batch_tokens=1k"])
    base = train_study(demo, tmp_path, {"encoding": "rope"})[0].folder
    fewer = [f"init.from={base}", "train.steps=20", "train.batch_tokens=1k", "train.eval_every=null"]
    extension = recipe.load(ROOT / "recipes/extend-demo.yaml", fewer)
    tuned = train_study(extension, tmp_path)[0].facts["val_loss"]
    accelerator = make_accelerator(extension)
    validator = Validator(extension, load_data(extension, accelerator).validation, accelerator)
    untuned, plain = (
        validator.evaluate(AutoModelForCausalLM.from_pretrained(base / "final", length=256, rescale=rescale))
        for rescale in ("yarn:4", "none")
    )
    assert untuned is not None
    assert plain is not None
    assert tuned < min(untuned["val_loss"], plain["val_loss"]) - 0.02
