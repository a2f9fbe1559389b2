"""The demo's prompts: the same in every version, eight of each kind."""

from __future__ import annotations

import hashlib
from collections import Counter

from demo.prompts import GROUPS, all_prompts


def test_there_are_eight_prompts_of_each_group_in_order() -> None:
    prompts = all_prompts()
    assert Counter(prompt.group for prompt in prompts) == dict.fromkeys(GROUPS, 8)
    order = list(GROUPS)
    assert prompts == sorted(prompts, key=lambda prompt: order.index(prompt.group))


def test_no_prompt_is_asked_twice() -> None:
    texts = [prompt.text for prompt in all_prompts()]
    assert len(set(texts)) == len(texts)


def test_the_code_to_edit_is_the_function_that_its_file_is_named_after() -> None:
    for prompt in all_prompts():
        if prompt.group == "edit":
            name = prompt.source.removesuffix(".txt")
            assert f"def {name}(" in prompt.text
            assert f"`{name}_checked`" in prompt.text


def test_the_prompts_are_those_of_the_published_figures() -> None:
    # Whoever changes a prompt runs the demo and the comparisons anew.
    text = "\0".join(prompt.text for prompt in all_prompts())
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "a9379197c308c5d9"
