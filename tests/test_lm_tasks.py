"""The lm-eval tasks: found by --include_path, made without a download, exactly as long as they say."""

import re
import shutil
from pathlib import Path

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from pe_study.data import Tokenizer
from pe_study.errors import UsageError
from pe_study.evaluators import lm_tasks
from pe_study.lm_eval import PEStudyLM
from pe_study.model import PEStudyConfig, PEStudyForCausalLM
from pe_study.text.tokenization import _train, _wrap, byte_tokenizer

TASKS = Path(__file__).resolve().parent.parent / "evals" / "tasks"
NAMES = sorted(path.stem for path in TASKS.glob("*.yaml"))
PROSE = ["The special magic number for amber river is 12345. What is the pass key? There and back again."] * 3


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of a small model with a byte tokenizer, and with a trained one."""
    folders = {}
    for name, hf in (("byte", byte_tokenizer()), ("bpe", _wrap(_train(PROSE, 320)))):
        folders[name] = str(tmp_path_factory.mktemp(name))
        config = PEStudyConfig(
            vocab_size=len(hf),
            num_layers=1,
            d_model=16,
            num_heads=2,
            num_kv_heads=2,
            d_ff=16,
            max_positions=64,
            encoding={"name": "rope"},
            train_length=64,
        )
        PEStudyForCausalLM(config).save_pretrained(folders[name])
        Tokenizer(hf, name).save(folders[name])
    return folders


def test_every_task_is_found():
    found = TaskManager(include_path=str(TASKS), include_defaults=False)
    tasks = ("distractors", "needle", "passkey", "uuid")
    assert sorted([f"pe_{task}" for task in tasks] + [f"pe_{task}_choice" for task in tasks]) == NAMES
    assert set(NAMES) <= set(found.all_tasks)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
@pytest.mark.parametrize("task", ["passkey", "uuid"])
def test_prompts_fill_the_length(task, kind, checkpoints):
    documents = lm_tasks.task_documents(task, checkpoints[kind], max_length="1k", num_samples=1)["test"]
    tokenizer = Tokenizer(lm_tasks.open_checkpoint(checkpoints[kind]).tokenizer(), kind)
    assert len(documents) == 5
    for document in documents:
        assert len(tokenizer.encode(document["prompt"])) == 1024 - 64
        assert document["answer"] == document["candidates"][0] and document["answer"] in document["prompt"]
        assert len(set(document["candidates"])) == 10
        assert lm_tasks.is_right(document, [f" {document['answer']}. Remember"]) == {"acc": 1.0}
        assert lm_tasks.is_right(document, [" 00000"]) == {"acc": 0.0}


def test_a_bos_that_the_tokenizer_adds_is_counted(tmp_path, checkpoints):
    """Case 09: one token more than the context holds, and lm-eval would cut the BOS off."""
    from tokenizers.processors import TemplateProcessing

    hf = byte_tokenizer()
    hf.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["byte"], folder)
    hf.save_pretrained(folder)
    lm = PEStudyLM(str(folder), max_length="1k", device="cpu")
    for document in lm_tasks.task_documents("passkey", str(folder), max_length="1k", num_samples=1)["test"]:
        ids = lm.tok_encode(document["prompt"])
        assert document["length"] == len(ids) == 1024 - 64
        assert ids[0] == 256 and ids[1] != 256


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"max_length": 64},
            r"at least and its answer 64, max_length is 64; accepted: max_length=\d+ or more",
        ),
        ({"length": 64}, r"at least, length is 64; accepted: length \d+ or more"),
    ],
)
def test_a_length_that_no_prompt_has_is_named_with_what_is_needed(asked, message, checkpoints):
    with pytest.raises(UsageError, match=r"pe_passkey: a prompt takes \d+ tokens " + message) as refusal:
        lm_tasks.task_documents("passkey", checkpoints["byte"], **asked)
    assert refusal.value.exit_code == 2
    [needed] = re.findall(r"(?:max_length=|length )(\d+) or more", str(refusal.value))
    enough = lm_tasks.task_documents("passkey", checkpoints["byte"], **{key: int(needed) for key in asked})
    assert len(enough["test"]) == 25


def test_prompts_without_max_length_are_answered(checkpoints):
    """The README's command on a run like the demo's, trained at 64: the task's prompts of 960, none cut."""
    args = {"pretrained": checkpoints["byte"], "device": "cpu", "rescale": "yarn:4"}
    lm = PEStudyLM(**args)
    lm_eval.simple_evaluate(
        model=lm,
        tasks=["pe_passkey", "pe_passkey_choice"],
        task_manager=TaskManager(
            include_path=str(TASKS), include_defaults=False, metadata={**args, "num_samples": 1}
        ),
        limit=1,
        bootstrap_iters=0,
    )
    lengths = lm.get_model_info()["task_lengths"]
    assert lengths == {"pe_passkey": 1024, "pe_passkey_choice": 960 + 6 - 1}


def test_length_can_be_set():
    with pytest.raises(UsageError, match=r"pe_passkey: no pretrained= in --model_args"):
        lm_tasks.task_documents("passkey", length=100)


def test_tasks_run_in_lm_eval(checkpoints):
    """Both ways of scoring, on a model that knows nothing."""
    args = {"pretrained": checkpoints["byte"], "max_length": 448, "device": "cpu"}
    results = lm_eval.simple_evaluate(
        model=PEStudyLM(**args),
        tasks=["pe_passkey", "pe_passkey_choice"],
        task_manager=TaskManager(
            include_path=str(TASKS), include_defaults=False, metadata={**args, "num_samples": 1}
        ),
        limit=1,
        bootstrap_iters=0,
    )
    assert results["results"]["pe_passkey"]["acc,none"] == 0.0
    assert results["results"]["pe_passkey_choice"]["acc,none"] in (0.0, 1.0)
    assert results["n-samples"]["pe_passkey"]["original"] == 5
