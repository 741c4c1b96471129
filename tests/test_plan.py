"""Plans: lengths, protocols with their own options, and flags on top."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_study import plan
from pe_study.errors import PlanError
from pe_study.plan import Plan, load_plan
from pe_study.settings.leaves import parse_length


def refused(source: dict, *overrides: str) -> str:
    with pytest.raises(PlanError) as error:
        load_plan(source, overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        *((512, 512), ("2k", 2048), ("2K", 2048), ("0.5k", 512), ("1x", 64), ("4x", 256), ("1.25x", 80)),
        *(("0.5x", 32), ("1.1x", 70), ("1e3", None), ("2kB", None), ("0x", None), ("-1x", None), (1.5, None)),
        *((True, None), ("", None), (0, None), (-5, None), (None, None), ("x", None), ("512", None)),
        *(("0.3k", None), ("1_000x", None)),
    ],
)  # fmt: skip
def test_a_length_is_tokens_kilotokens_or_training_lengths(value: object, tokens: int | None) -> None:
    """2k is 2048; a multiple is exact and rounded half up (1.1 x 64 = 70.4)."""
    if tokens is not None:
        assert parse_length(value, 64) == tokens
        return
    with pytest.raises(ValueError, match="accepted: a length such as 512, 2k"):
        parse_length(value, 64)


def test_lengths_resolve_by_the_training_length() -> None:
    loaded = load_plan({"lengths": ["1x", "1.25x", 100, "2x", "2k"]})
    assert loaded.lengths == ("1x", "1.25x", 100, "2x", 2048)
    assert loaded.resolve_lengths(64) == (64, 80, 100, 128, 2048)
    with pytest.raises(PlanError, match=r"lengths: found 100 at or below the length before it"):
        loaded.resolve_lengths(512)
    with pytest.raises(PlanError, match=r"lengths: 1x needs a training length"):
        loaded.resolve_lengths(None)
    assert load_plan({"lengths": [1, 2]}).resolve_lengths(None) == (1, 2)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"lengths": [4, 2]}, "plan: lengths: found 2 at or below the length before it; accepted: ascending"),
        ({"lengths": ["1k", 1024]}, "plan: lengths: found 1024 at or below"),
        ({"lengths": ["2x", "1.5x"]}, "plan: lengths: found 1.5x at or below"),
        ({"lengths": []}, "plan: lengths: found an empty list"),
        ({"lengths": "2k"}, 'plan: lengths: found the text "2k"; accepted: a list'),
        ({"lengths": ["4kb"]}, 'plan: lengths.0: found the text "4kb"; accepted: a length such as'),
        ({"protocols": ["slide"]}, '(did you mean "sliding"?)'),
        ({"protocols": ["sliding"]}, "plan: protocols.0: sliding needs a stride"),
        ({"protocols": [{"name": "sliding", "stride": 0}]}, "plan: protocols.0.stride: found 0"),
        ({"protocols": [{"name": "prefix", "stride": 4}]}, "found stride with prefix; accepted: stride"),
        ({"protocols": [{"name": "sliding", "stride": 4, "anchors": 1}]}, "found anchors with sliding"),
        ({"protocols": [{"name": "exact-context", "anchors": 1}]}, "accepted: anchors with fixed-target"),
        ({"protocols": [{"name": "nonoverlapping", "num_targets": 1}]}, "with exact-context or fixed-target"),
        ({"protocols": [{"name": "exact-context", "targets": 3}]}, 'unknown key; did you mean'),
        ({"protocols": [{"stride": 3}]}, "protocols.0.name: this key is required"),
        ({"protocols": [3]}, "plan: protocols.0: found 3; accepted: a mapping"),
        ({"protocols": ["prefix", "prefix"]}, "plan: protocols: found prefix twice"),
        ({"rescales": ["none", "none"]}, "plan: rescales: found none twice"),
        ({"rescales": ["linear:4", "linear:4.0"]}, "plan: rescales: found linear:4.0 twice"),
        ({"rescales": [None]}, 'plan: rescales.0: found nothing; accepted: a rescale such as none, "linear:'),
        ({"rescales": [4]}, "plan: rescales.0: found 4"),
        ({"rescales": ["lin:4"]}, "plan: rescales.0: "),
        ({"rescales": ["linear:x"]}, "plan: rescales.0: "),
        ({"unit": "documents"}, '(did you mean "document"?)'),
        ({"bos": "on"}, 'plan: bos: found the text "on"; accepted: true or false, or auto'),
        ({"bos": 1}, "plan: bos: found 1"),
        ({"num_documents": 0}, "plan: num_documents: found 0; accepted: a whole number of at least 1, or"),
        ({"aggregation": "mean"}, "plan: aggregation: found the text"),
        ({"batch_tokens": -1}, "plan: batch_tokens: found -1; accepted: a whole number of at least 1"),
        ({"truncation": "yes"}, 'plan: truncation: found the text "yes"; accepted: true or false'),
        ({"tasks": ["pass"]}, 'plan: tasks.0: found the text "pass"; accepted: one of passkey'),
        ({"tasks": ["copy", "copy"]}, "plan: tasks: found copy twice"),
        ({"depths": [0.5, 0.25]}, "plan: depths: found depths out of order"),
        ({"depths": [1.5]}, "plan: depths.0: found 1.5; accepted: a number of at least 0 and of at most 1"),
        ({"num_samples": 0}, "plan: num_samples: found 0; accepted: a whole number of at least 1"),
        ({"corpus": ""}, "plan: corpus: found the text"),
        ({"name": "a/b"}, "plan: name: found the text"),
        ({"length": [512]}, 'plan: length: unknown key; did you mean "lengths"?'),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(source: dict, message: str) -> None:
    assert message in refused(source)
    assert "\n" not in refused(source)


def test_protocols_are_names_or_mappings_with_their_defaults() -> None:
    loaded = load_plan(
        {
            "lengths": [512, "1k"],
            "protocols": [
                "nonoverlapping",
                {"name": "sliding", "stride": "0.5x"},
                {"name": "sliding", "stride": 1},
                "exact-context",
                {"name": "fixed-target", "anchors": 3},
            ],
        }
    )
    assert loaded.model_dump(mode="json")["protocols"] == [
        "nonoverlapping",
        {"name": "sliding", "stride": "0.5x"},
        {"name": "sliding", "stride": 1},
        {"name": "exact-context", "num_targets": 64},
        {"name": "fixed-target", "num_targets": 200, "anchors": 3},
    ]
    assert [protocol.stride for protocol in loaded.resolve(512).protocols] == [None, 256, 1, None, None]


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        ({"name": "sliding", "stride": 65}, "protocols: sliding: found stride 65; accepted: at most 64"),
        (
            {"name": "fixed-target", "num_targets": 64},
            "found num_targets 64; accepted: fewer than 64, the shortest",
        ),
    ],
)
def test_options_fit_the_shortest_length(protocol: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        load_plan({"lengths": ["1x", "2x"], "protocols": [protocol]}).resolve(64)


@pytest.mark.parametrize("original", [512, 2048, 4096, 8192, 131072])
def test_the_plan_of_checkpoints_fits_every_original_length(original: int) -> None:
    """`--lengths 2k,4k,8k,16k,32k` over evals/length.yaml, whatever length the checkpoint has."""
    loaded = load_plan(Path(__file__).parents[1] / "evals" / "length.yaml", ["lengths=[2k,4k,8k,16k,32k]"])
    [sliding] = [each for each in loaded.resolve(original).protocols if each.name == "sliding"]
    assert sliding.stride == min(original // 2, 2048)
    said = loaded.cut_strides(original)
    assert len(said) == int(original > 4096)
    if original == 8192:
        assert said == [
            "protocols: sliding: stride 0.5x is 4096 tokens, cut to 2048, the shortest length "
            "(there it is nonoverlapping)"
        ]


def test_strides_that_are_cut_to_one_are_measured_once() -> None:
    protocols = [{"name": "sliding", "stride": stride} for stride in ("0.25x", "0.5x", "1x", 16)]
    loaded = load_plan({"lengths": [16, 64], "protocols": protocols})
    assert [protocol.stride for protocol in loaded.resolve(64).protocols] == [16]
    assert len(loaded.cut_strides(64)) == 2


def test_a_document_is_read_to_the_longest_length_at_least() -> None:
    plan_of = lambda tokens: load_plan({"lengths": ["1x", "4x"], "tokens_per_document": tokens})  # noqa: E731
    assert plan_of("16x").resolve(64).tokens_per_document == 1024
    assert plan_of("2x").resolve(64).tokens_per_document == 256
    assert plan_of(None).resolve(64).tokens_per_document is None
    with pytest.raises(PlanError, match="tokens_per_document: 16x needs a training length"):
        load_plan({"lengths": [8], "tokens_per_document": "16x"}).resolve(None)


def test_flags_override_a_plan_whether_a_file_or_a_mapping(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("lengths: [1x, 2x]\nprotocols: [{name: sliding, stride: 32}]\nnum_documents: 3\n")
    overrides = [
        "lengths=[1x, 2k]",
        'rescales=[none, "yarn:4:beta_fast=16"]',
        "bos=true",
        "protocols.sliding.stride=16",
    ]
    from_file = load_plan(path, overrides)
    assert from_file.name == "mine"
    assert (from_file.lengths, from_file.bos, from_file.num_documents) == (("1x", 2048), True, 3)
    assert from_file.protocols[0].stride == 16
    assert from_file == load_plan(load_plan(path).model_dump(mode="json"), overrides)
    assert from_file == load_plan(path).with_overrides(overrides)
    assert 'override "bos=on": bos: found the text "on"' in refused({}, "bos=on")


def test_a_plan_may_include_another(tmp_path) -> None:
    (tmp_path / "low.yaml").write_text("name: low\nnum_documents: 7\nlengths: [1x]\n")
    (tmp_path / "top.yaml").write_text("include: low.yaml\nlengths: [2x]\n")
    loaded = load_plan(tmp_path / "top.yaml")
    assert (loaded.lengths, loaded.num_documents) == (("2x",), 7)
    (tmp_path / "top.yaml").write_text("include: low.yaml\nlengths: [2x]\nnum_documents: many\n")
    with pytest.raises(PlanError, match=r"top\.yaml:3: num_documents: found the text"):
        load_plan(tmp_path / "top.yaml")


def test_a_plan_dumps_to_an_equal_plan() -> None:
    loaded = load_plan({"protocols": ["prefix", {"name": "sliding", "stride": 8}], "lengths": ["1x", 1000]})
    assert load_plan(loaded.model_dump(mode="json")) == loaded


def test_every_key_and_protocol_is_described() -> None:
    assert all(field.description for field in Plan.model_fields.values())
    assert list(plan.PROTOCOLS) == ["nonoverlapping", "sliding", "prefix", "exact-context", "fixed-target"]


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**62),
    st.floats(),
    st.sampled_from(
        ["1x", "2x", "2k", "none", "yarn:4", "linear:", "sliding", "prefix", "auto", "", "é", "a/b", "\0"]
    ),
)
ANYTHING = st.one_of(
    LEAVES,
    st.lists(LEAVES, max_size=3),
    st.lists(
        st.dictionaries(st.sampled_from(["name", "stride", "num_targets", "anchors"]), LEAVES), max_size=2
    ),
)


@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(
    st.dictionaries(st.sampled_from([*Plan.model_fields, "length"]), ANYTHING, max_size=4),
    st.integers(1, 5000),
)
def test_any_mapping_gives_a_plan_or_one_clear_line(source: dict, train_length: int) -> None:
    try:
        resolved = load_plan(source).resolve(train_length)
    except PlanError as error:
        assert "\n" not in str(error)
    else:
        assert load_plan(resolved.model_dump(mode="json")) == resolved
        assert resolved.resolve(None) == resolved
