from __future__ import annotations

from pathlib import Path

import pytest

from vllm_drafter.settings import KNOBS, SettingError, Settings, is_switched_off, read_settings


def test_everything_has_a_default():
    assert read_settings({}) == Settings(enabled=True, stamps=None)


@pytest.mark.parametrize("text", ["0", "false", "off", "no", " OFF "])
def test_the_switch_turns_the_plugin_off(text):
    assert is_switched_off({"VLLM_DRAFTER": text})
    assert not read_settings({"VLLM_DRAFTER": text}).enabled


@pytest.mark.parametrize("text", ["1", "true", "on", "yes"])
def test_the_switch_can_be_set_to_on(text):
    assert read_settings({"VLLM_DRAFTER": text}).enabled


def test_a_switch_that_means_nothing_is_an_error_that_says_what_is_expected():
    with pytest.raises(SettingError, match=r"VLLM_DRAFTER='maybe': expected 1 or 0"):
        read_settings({"VLLM_DRAFTER": "maybe"})


def test_a_wrong_name_is_an_error_that_names_the_nearest():
    with pytest.raises(
        SettingError, match=r"VLLM_DRAFTER_STAMP is not.*mean VLLM_DRAFTER_STAMPS\?"
    ):
        read_settings({"VLLM_DRAFTER_STAMP": "stamps.jsonl"})


def test_a_name_near_to_nothing_is_an_error_that_lists_the_settings():
    with pytest.raises(SettingError) as caught:
        read_settings({"VLLM_DRAFTER_QQQ": "1"})
    assert "Did you mean" not in str(caught.value)
    assert all(knob.name in str(caught.value) for knob in KNOBS)


def test_variables_of_vllm_are_none_of_our_business():
    assert read_settings({"VLLM_DRAFT": "1", "VLLM_PLUGINS": "other"}) == Settings()


def test_stamps_go_to_a_file_in_a_directory_that_exists(tmp_path):
    assert read_settings({"VLLM_DRAFTER_STAMPS": str(tmp_path / "new")}).stamps == tmp_path / "new"


@pytest.mark.parametrize(
    "make", [lambda p: p / "missing" / "file", lambda p: p], ids=["no-dir", "a-dir"]
)
def test_stamps_that_cannot_be_written_are_an_error_at_start_up(tmp_path: Path, make):
    with pytest.raises(SettingError, match="VLLM_DRAFTER_STAMPS"):
        read_settings({"VLLM_DRAFTER_STAMPS": str(make(tmp_path))})


@pytest.mark.parametrize("text", ["", "-1", "many", "nan", "inf"])
@pytest.mark.parametrize(
    "name",
    [
        "VLLM_DRAFTER_LOG_SECONDS",
        "VLLM_DRAFTER_SNAPSHOT_MINUTES",
        "VLLM_DRAFTER_VERIFY_TOKENS",
    ],
)
def test_a_number_that_is_none_or_out_of_range_says_what_is_expected(name, text):
    [knob] = [knob for knob in KNOBS if knob.name == name]
    with pytest.raises(SettingError) as caught:
        read_settings({name: text})
    assert f"{name}={text!r}: expected {knob.values}" in str(caught.value)


def test_a_number_of_tokens_that_is_too_large_names_the_largest():
    with pytest.raises(SettingError, match=r"expected a number of tokens up to 2\*\*30"):
        read_settings({"VLLM_DRAFTER_VERIFY_TOKENS": str(2**30 + 1)})


def test_a_wrong_variable_does_not_keep_anyone_from_turning_the_plugin_off():
    assert not read_settings({"VLLM_DRAFTER": "0", "VLLM_DRAFTER_NONSENSE": "1"}).enabled


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_the_default_of_each_knob_is_among_its_values(knob):
    knob.parse(knob.default)


@pytest.mark.parametrize("page", ["docs/knobs.md", "packages/vllm-plugin/README.md"])
def test_each_page_of_settings_has_every_variable_with_its_default_and_values(page):
    text = (Path(__file__).parents[3] / page).read_text()
    lines = [line for line in text.splitlines() if line.startswith("| `VLLM_")]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    assert {name: (default, values) for name, default, values, _ in rows} == {
        knob.name: (knob.default or "none", knob.values) for knob in KNOBS
    }


def test_a_route_and_a_sharing_that_are_none_say_what_there_is():
    with pytest.raises(SettingError, match=r"ROUTE='arctic': expected patch, custom_class or shim"):
        read_settings({"VLLM_DRAFTER_ROUTE": "arctic"})
    with pytest.raises(SettingError, match=r"'LORA': expected global, lora or none"):
        read_settings({"VLLM_DRAFTER_SHARING": "LORA"})


def test_the_route_custom_class_cannot_tell_adapters_apart():
    with pytest.raises(SettingError, match=r"SHARING=lora: expected global or none with .*ROUTE="):
        read_settings({"VLLM_DRAFTER_ROUTE": "custom_class", "VLLM_DRAFTER_SHARING": "lora"})
