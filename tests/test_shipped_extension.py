"""The shipped recipe of context extension goes on from the shipped demonstration's run."""

from pathlib import Path

import pytest
from tiny import write_corpus
from transformers import AutoModelForCausalLM

from pe_study import recipe, runs
from pe_study.train import train_study

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
