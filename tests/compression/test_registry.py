"""The line that a person types, taken apart."""

import pytest

from edgefl.compression.registry import parse_spec


@pytest.mark.parametrize(
    ("text", "prefix", "stages", "codec"),
    [
        ("dense", "", (("dense", ""),), "dense"),
        (" topk:0.01 | int8|rice", "", (("topk", "0.01"), ("int8", ""), ("rice", "")), "topk:0.01|int8|rice"),
        ("ef|qsgd:4:128", "ef", (("qsgd", "4:128"),), "qsgd:4:128"),
        ("ef", "ef", (), "dense"),
        ("delta|fp16|zstd:9", "delta", (("fp16", ""), ("zstd", "9")), "fp16|zstd:9"),
        ("fp16|ef", "", (("fp16", ""), ("ef", "")), "fp16|ef"),
        ("", "", (("", ""),), "dense"),
    ],
)
def test_a_line_is_a_prefix_and_stages(
    text: str, prefix: str, stages: tuple[tuple[str, str], ...], codec: str
) -> None:
    found = parse_spec(text)
    assert (found.text, found.prefix, found.stages) == (text, prefix, stages)
    assert found.line == codec
