"""The schema describes itself fully: help for every key, defaults that its own rules accept."""

import pytest

from shardwise.config.keys import all_keys, section_classes
from shardwise.config.values import example, read_value, toml_or_text


@pytest.mark.parametrize("name", list(all_keys()))
def test_every_key_has_help_and_a_default_that_passes(name):
    key = all_keys()[name]
    assert key.help
    if key.default is not None:
        raw = list(key.default) if isinstance(key.default, tuple) else key.default
        assert read_value(key, raw, None) == key.default


@pytest.mark.parametrize("name", [name for name, key in all_keys().items() if not key.later and key.available is None])
def test_the_example_of_the_fix_line_is_accepted(name):
    key = all_keys()[name]
    read_value(key, toml_or_text(example(key)), None)


def test_every_section_says_what_it_is():
    for section, cls in section_classes().items():
        assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__), section
