"""Units are read exactly, and numbers are printed the way people compare them."""

import pytest

from shardwise.config.units import (
    format_bytes,
    format_count,
    format_seconds,
    parse_binary,
    parse_bytes,
    parse_decimal,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_binary, "8k", 8192),
        (parse_binary, "8K", 8192),
        (parse_binary, "4M", 4194304),
        (parse_binary, "1.5k", 1536),
        (parse_binary, "4,096", 4096),
        (parse_decimal, "1T", 10**12),
        (parse_decimal, "300B", 300 * 10**9),
        (parse_decimal, "1.5M", 1_500_000),
        (parse_decimal, "0.1k", 100),
        (parse_bytes, "40GiB", 40 * 2**30),
        (parse_bytes, "25MB", 25_000_000),
        (parse_bytes, "512 MiB", 512 * 2**20),
        (parse_bytes, "1024", 1024),
        (parse_seconds, "5m", 300.0),
        (parse_seconds, "90s", 90.0),
        (parse_seconds, "1h30m", 5400.0),
        (parse_seconds, "2d", 172800.0),
        (parse_seconds, "250ms", 0.25),
        (parse_seconds, "1:30:00", 5400.0),
        (parse_seconds, "45", 45.0),
        (parse_rate, "50GB/s", 50e9),
        (parse_rate, "400Gbit/s", 50e9),
        (parse_rate, "400Gb/s", 50e9),
        (parse_rate, "1GiB/s", 2.0**30),
    ],
)
def test_reads(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_binary, "8q"),
        (parse_binary, ""),
        (parse_binary, "1.0001k"),
        (parse_decimal, "1.23456789k"),
        (parse_decimal, "k"),
        (parse_decimal, "nan"),
        (parse_bytes, "40 bananas"),
        (parse_bytes, "-1GiB"),
        (parse_seconds, "5 fortnights"),
        (parse_seconds, "m5"),
        (parse_seconds, "5m later"),
        (parse_seconds, ""),
        (parse_rate, "50"),
        (parse_rate, "50GB"),
    ],
)
def test_never_guesses(parse, text):
    with pytest.raises(ValueError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (format_bytes(38.2 * 2**30), "38.2 GiB"),
        (format_bytes(512 * 2**20), "512 MiB"),
        (format_bytes(1023.9 * 2**20), "1.0 GiB"),
        (format_bytes(12), "12 B"),
        (format_count(3_400_000), "3.4 M"),
        (format_count(70_553_706_496), "70.6 B"),
        (format_count(999), "999"),
        (format_seconds(72), "1:12"),
        (format_seconds(7500), "2:05:00"),
        (format_seconds(3 * 86400 + 4 * 3600), "3 d 4:00:00"),
        (format_seconds(0.286), "0.29 s"),
        (format_seconds(0.0021), "2.10 ms"),
    ],
)
def test_prints(text, value):
    assert text == value
