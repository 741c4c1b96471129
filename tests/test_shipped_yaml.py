"""Every YAML file that ships is valid, and what its comments claim is so."""

import shlex
import string
from pathlib import Path

import pytest
import yaml
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from tiny import shipped_fsdp
from transformers import LlamaConfig, LlamaForCausalLM

from pe_study import kept, plan, recipe
from pe_study.configuration import PEStudyConfig
from pe_study.evaluators import controls, far_context
from pe_study.model import PEStudyForCausalLM
from pe_study.sweep import sweep
from pe_study.training.foreign import ForeignDecoder

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PLANS = sorted(path for path in (ROOT / "evals").rglob("*.yaml") if "tasks" not in path.parts)
ACCELERATE = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
SIX = {"sinusoidal", "learned", "shaw", "t5", "rope", "alibi"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_a_recipe_is_valid_and_reloads(path: Path, tmp_path) -> None:
    loaded = recipe.load(path)
    copy = tmp_path / "recipe.yaml"
    copy.write_text(recipe.resolved_yaml(loaded), encoding="utf-8")
    assert recipe.load(copy) == loaded
    assert loaded.name == path.stem


def test_the_promised_recipes_ship() -> None:
    promised = {"demo", "small", "wikitext103-512", "wikitext103-1024", "wikitext103-3072", "fineweb-125m"}
    assert promised <= {path.stem for path in RECIPES}
    for path in RECIPES:
        if path.stem in promised:
            assert SIX | {"nope"} <= {spec.name for spec in recipe.load(path).encodings}


@pytest.mark.parametrize("path", PLANS, ids=name)
def test_a_plan_is_valid_and_resolves(path: Path) -> None:
    loaded = plan.load_plan(path)
    assert loaded.name == path.stem
    loaded.resolve(2048)


def test_the_plan_of_controls_asks_for_each_and_fits_every_study() -> None:
    """Also one whose runs kept no weights; where they did, as those of `small`, a flag adds them."""
    loaded = plan.load_plan(ROOT / "evals" / "controls.yaml")
    for train_length in {recipe.load(path).train.length for path in RECIPES}:
        resolved = loaded.resolve(train_length)
        resolved.check_window()
        far_context.check(resolved, "a study", train_length)
    assert far_context.asked(loaded) == ("far_context=other-document", "far_context=shuffled")
    assert controls.asked(loaded.resolve(64)) == ("attention_window=64", "shuffle_positions")
    assert loaded.diagnostics
    assert not loaded.over_training
    train = recipe.load(ROOT / "recipes" / "small.yaml").train
    assert kept.steps_of(train.keep_at, train.steps) == (954, 1908, 3815)
    assert recipe.load(ROOT / "recipes" / "demo.yaml").train.keep_at == ()


@pytest.mark.parametrize("path", ACCELERATE, ids=name)
def test_an_accelerate_configuration_loads_in_accelerate(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(path))
    flags = vars(launch_command_parser().parse_args(["script"]))
    for key in config.fsdp_config:
        assert key in flags, f"accelerate launch would ignore {key}"
    expected = {"single_gpu": ("NO", 1), "multi_gpu_ddp": ("MULTI_GPU", 8), "fsdp2": ("FSDP", 8)}[path.stem]
    assert (config.distributed_type.value, config.num_processes) == expected
    assert config.mixed_precision == "no"
    assert config.main_training_function == "main"


def test_a_managed_job_is_a_line_of_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """No SkyPilot here: what it starts, and on which exit code it starts it again."""
    monkeypatch.chdir(ROOT)
    job = yaml.safe_load((ROOT / "recipes" / "skypilot" / "run.yaml").read_text(encoding="utf-8"))
    assert job["resources"]["job_recovery"] == {"recover_on_exit_codes": [75], "max_restarts_on_errors": 0}
    (command,) = [line for line in job["run"].splitlines() if line.startswith("exec ")]
    typed = [string.Template(word).substitute(job["envs"]) for word in shlex.split(command)[2:]]
    path = job["envs"]["RECIPE"]
    lines = sweep(path, runs_root="/runs", only={"run": job["envs"]["RUN"]})
    assert [line["argv"][1:] for line in lines] == [typed]


@pytest.mark.parametrize("kind", ["ours", "llama", "family"])
def test_fsdp_takes_each_layer_for_a_unit(kind: str) -> None:
    """Of our decoder and of those of other libraries, also where a family names layers that a model lacks."""
    decoder = LlamaForCausalLM(LlamaConfig(**TINY, vocab_size=64, intermediate_size=48))
    if kind == "family":
        decoder._no_split_modules = {"LlamaDecoderLayer", "LlamaVisionLayer"}
    ours = PEStudyConfig(vocab_size=64, num_layers=2, d_model=32, d_ff=48)
    model = PEStudyForCausalLM(ours) if kind == "ours" else ForeignDecoder(decoder)
    plugin = shipped_fsdp()
    plugin.set_auto_wrap_policy(model)
    is_unit = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert is_unit is not None
    layers = model.layers if kind == "ours" else decoder.model.layers
    assert [module for module in model.modules() if is_unit(module)] == [*layers]


def layer_parameters(model: recipe.ModelSpec) -> int:
    """Matrices of one decoder layer: queries, keys, values and output, and the three of SwiGLU."""
    assert model.num_kv_heads == model.num_heads
    return 4 * model.d_model**2 + 3 * model.d_model * model.d_ff


def operations(loaded: recipe.Recipe, vocabulary: int) -> float:
    """Floating-point operations of one run: 6 a weight and token, and causal attention."""
    model, train = loaded.model, loaded.train
    weights = model.num_layers * layer_parameters(model) + vocabulary * model.d_model
    attention = 12 * model.num_layers * model.d_model * train.length / 2
    return (6 * weights + attention) * train.batch_tokens * train.steps


def test_small_is_twenty_gpu_hours_by_arithmetic() -> None:
    loaded = recipe.load(ROOT / "recipes/small.yaml")
    train, model = loaded.train, loaded.model
    assert (model.num_layers, model.d_model, model.num_heads, model.d_ff) == (8, 512, 8, 1408)
    assert (train.length, train.batch_tokens, train.steps, train.lr) == (512, 131_072, 7630, 1e-3)
    assert train.warmup_steps == pytest.approx(0.05 * train.steps, abs=1)
    assert (train.mixed_precision, loaded.data.packing, loaded.data.tokenizer) == (
        "bf16",
        "within-document",
        "bpe:16384",
    )
    assert model.num_layers * layer_parameters(model) == pytest.approx(25.7e6, rel=2e-3)
    total = operations(loaded, 16_384) * len(loaded.runs())
    assert total / 64e12 / 3600 == pytest.approx(20, rel=0.05)
    assert loaded.eval.resolve(512).lengths[-1] + 1 == 16_385


@pytest.mark.parametrize("length", [512, 1024, 3072])
def test_wikitext103_has_the_parameters_and_updates_of_the_paper(length: int) -> None:
    loaded = recipe.load(ROOT / f"recipes/wikitext103-{length}.yaml")
    model, train = loaded.model, loaded.train
    assert (model.num_layers, model.d_model, model.num_heads, model.d_ff, model.dropout) == (
        16,
        1024,
        8,
        2752,
        0.3,
    )
    swiglu, relu = 3 * 1024 * 2752, 2 * 1024 * 4096
    assert swiglu / relu - 1 == pytest.approx(0.008, abs=2e-4)
    assert model.num_layers * layer_parameters(model) + 32_768 * 1024 == pytest.approx(236e6, rel=2e-3)
    assert train.length == length
    assert train.batch_tokens * train.steps / 103e6 == pytest.approx(205, abs=1)
    assert loaded.eval.unit == "stream"
    published = {512: 15512, 1024: 16024, 3072: 16072}
    assert loaded.eval.lengths[0] == length
    assert loaded.eval.lengths[-1] == published[length] <= model.max_positions


def test_fineweb_has_the_cost_it_claims() -> None:
    loaded = recipe.load(ROOT / "recipes/fineweb-125m.yaml")
    model = loaded.model
    assert model.num_layers * layer_parameters(model) == pytest.approx(84.9e6, rel=1e-3)
    assert model.num_layers * layer_parameters(model) + 50_257 * 768 == pytest.approx(123.5e6, rel=1e-3)
    assert operations(loaded, 50_257) == pytest.approx(8.0e18, rel=0.01)
    assert (loaded.train.length, loaded.train.batch_tokens * loaded.train.steps) == (1024, 9_999_745_024)
