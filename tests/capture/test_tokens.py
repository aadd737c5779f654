"""A token file is taken only if every id is one; a split covers every token exactly once."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from gdncheck.capture.errors import BadInput
from gdncheck.capture.tokens import call_lengths, check_ids, read_tokens, token_hash
from hypothesis import given
from hypothesis import strategies as st

IDS = st.lists(st.integers(0, 2**31), min_size=1, max_size=50)


def written(tmp_path: Path, document: Any, name: str = "tokens.json") -> Path:
    path = tmp_path / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


@pytest.mark.parametrize("form", [lambda ids: ids, lambda ids: {"tokens": ids, "source": "a page"}])
def test_ids_come_back_as_they_were_written(tmp_path: Path, form: Any) -> None:
    found = read_tokens(written(tmp_path, form([5, 0, 7])))
    assert found.ids == [5, 0, 7]
    assert found.lengths is None


def test_list_of_lists_gives_the_calls(tmp_path: Path) -> None:
    found = read_tokens(written(tmp_path, [[1, 2, 3], [4], [5, 6]]))
    assert found.ids == [1, 2, 3, 4, 5, 6]
    assert found.lengths == [3, 1, 2]


def test_text_is_left_for_the_tokenizer(tmp_path: Path) -> None:
    found = read_tokens(written(tmp_path, "[1, 2]", "prompt.txt"))
    assert found.ids is None
    assert found.text == "[1, 2]"


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("", "is no JSON"),
        ("[1, 2", "is no JSON (line 1"),
        ("[" * 100_000, "is no JSON"),
        ([], "holds no token"),
        ({"tokens": []}, "holds no token"),
        ({"ids": [1]}, "has no key tokens (keys: ids)"),
        ("null", "holds a NoneType"),
        ("7", "holds a int"),
        ([1, 2.0], "token 1 is 2.0, not an integer"),
        ([True], "token 0 is true, not an integer"),
        ([1, None], "token 1 is null"),
        ([3, "4"], 'token 1 is "4"'),
        ([3, [4]], "token 1 is [4]"),
        ([[1], 2], "call 1 is a int"),
        ([[1], []], "call 1 is an empty call"),
        ([[1], [2, [3]]], "call 1, token 1 is [3]"),
        ([-1], "token 0 is -1"),
        ([2**63], "token 0 is 9223372036854775808"),
        ("[NaN]", "token 0 is NaN"),
    ],
)
def test_what_is_no_token_array_gets_one_line(tmp_path: Path, document: Any, complaint: str) -> None:
    path = written(tmp_path, document)
    with pytest.raises(BadInput) as error:
        read_tokens(path)
    assert complaint in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_missing_directory_and_binary_files_get_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe[1]")
    for name, complaint in (
        ("absent.json", "no such file"),
        ("", "is a directory"),
        ("binary.json", "not UTF-8"),
    ):
        with pytest.raises(BadInput, match=complaint):
            read_tokens(tmp_path / name)
    with pytest.raises(BadInput, match="is empty"):
        read_tokens(written(tmp_path, "", "empty.txt"))


def test_id_beyond_the_vocabulary_is_named_with_its_index() -> None:
    check_ids([0, 255], 256, "tokens.json")
    with pytest.raises(BadInput, match=r"tokens.json: token 1 is 256 but the model's vocabulary has 256 ids"):
        check_ids([255, 256, 999], 256, "tokens.json")


@given(IDS)
def test_hash_is_sha256_of_little_endian_int64(ids: list[int]) -> None:
    assert token_hash(ids) == hashlib.sha256(b"".join(struct.pack("<q", i) for i in ids)).hexdigest()


@given(st.integers(1, 500), st.one_of(st.none(), st.integers(1, 600)))
def test_even_split_covers_every_token_once(n_tokens: int, split: int | None) -> None:
    lengths = call_lengths(n_tokens, split)
    assert sum(lengths) == n_tokens
    assert all(length >= 1 for length in lengths)
    if split is not None:
        assert all(length == split for length in lengths[:-1])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 40))
def test_listed_split_keeps_its_lengths_and_the_rest_is_a_call(split: list[int], rest: int) -> None:
    lengths = call_lengths(sum(split) + rest, split)
    assert lengths == split + ([rest] if rest else [])


@pytest.mark.parametrize(
    ("split", "complaint"),
    [
        (0, "at least one token"),
        (-3, "at least one token"),
        ([4, 0], "a call of 0 tokens"),
        ([6, 5], "sums to 11"),
    ],
)
def test_split_that_cannot_be_is_refused(split: Any, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        call_lengths(10, split)
